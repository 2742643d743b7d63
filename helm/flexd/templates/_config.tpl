{{/*
The daemon's YAML: the user's values, with what the chart's ports, mounts, probes and shape rely on laid over them.
Takes (dict "root" $ "role" ROLE); the role is standalone, leader or follower.
*/}}
{{- define "flexd.config" -}}
{{- $values := .root.Values -}}
{{- $config := deepCopy $values.config -}}
{{- /* Helm merges the user's source into the default one, whose keys no other kind has. */ -}}
{{- if ne $config.stream.source.kind "kafka" -}}
{{- $_ := set $config.stream "source" (omit $config.stream.source "bootstrap_servers" "topic" "group_id") -}}
{{- end -}}
{{- $_ := set $config "server" (merge (dict "metrics_listen" (printf "0.0.0.0:%d" (int64 $values.metrics.port))) (default dict $config.server)) -}}
{{- $_ := set $config "state" (merge (dict "dir" "/var/lib/flexd") (default dict $config.state)) -}}
{{- /* A container that ends over and over would make the trainer's pod crash-loop. */ -}}
{{- if and (eq $values.shape "sidecar") (ne .role "follower") -}}
{{- $_ := set $config "state" (merge $config.state (dict "on_unusable" "wait")) -}}
{{- end -}}
{{- $_ := set $config "log" (merge (default dict $config.log) (dict "format" "json")) -}}
{{- if eq .role "follower" -}}
{{- $_ := unset $config "control" -}}
{{- $address := printf "%s:%d" (include "flexd.fullname" .root) (int64 $values.scaleOut.port) -}}
{{- $_ := set $config "scale_out" (merge (dict "role" "follower" "leader" $address "secret_file" "/etc/flexd/scale-out/secret") (default dict $config.scale_out)) -}}
{{- else -}}
{{- $control := dict "listen_host" "0.0.0.0" "listen_port" (int64 $values.control.port) "secret_file" "/etc/flexd/control/secret" -}}
{{- if $values.control.tls.existingSecret -}}
{{- $_ := set $control "tls" (dict "cert_file" "/etc/flexd/control-tls/tls.crt" "key_file" "/etc/flexd/control-tls/tls.key" "ca_file" "/etc/flexd/control-tls/ca.crt") -}}
{{- end -}}
{{- $_ := set $config "control" (merge $control (default dict $config.control)) -}}
{{- if eq .role "leader" -}}
{{- $_ := set $config "scale_out" (merge (dict "role" "leader" "listen_host" "0.0.0.0" "listen_port" (int64 $values.scaleOut.port) "secret_file" "/etc/flexd/scale-out/secret") (default dict $config.scale_out)) -}}
{{- end -}}
{{- if include "flexd.highlyAvailable" .root -}}
{{- $lease := dict "kind" "kubernetes" "name" (include "flexd.fullname" .root) -}}
{{- $_ := set $config "high_availability" (dict "lease" $lease "duration_seconds" $values.highAvailability.durationSeconds "renew_seconds" $values.highAvailability.renewSeconds) -}}
{{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- define "flexd.leaderConfig" -}}
{{- include "flexd.config" (dict "root" . "role" (ternary "leader" "standalone" (eq (include "flexd.withFollowers" .) "true"))) -}}
{{- end -}}

{{- define "flexd.followerConfig" -}}
{{- include "flexd.config" (dict "root" . "role" "follower") -}}
{{- end -}}
