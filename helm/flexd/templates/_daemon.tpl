{{/*
The daemon's container and its volumes. Both take (dict "root" $ "file" FILE "leader" BOOL): the key of the ConfigMap, and whether
the pod leads (or may).
*/}}
{{- define "flexd.container" -}}
{{- $values := .root.Values -}}
name: flexd
image: {{ include "flexd.image" .root | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
{{- if eq $values.shape "sidecar" }}
# A sidecar (Kubernetes 1.29 or later): it starts before the trainer, is restarted on its own, ends after it, and does
# not keep the job from completing.
restartPolicy: Always
{{- end }}
args: [run, -c, /etc/flexd/config/flexd.yaml]
{{- with $values.env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  {{- if .leader }}
  - name: control
    containerPort: {{ $values.control.port }}
  {{- if include "flexd.withFollowers" .root }}
  - name: scale-out
    containerPort: {{ $values.scaleOut.port }}
  {{- end }}
  {{- end }}
  - name: metrics
    containerPort: {{ $values.metrics.port }}
# /readyz waits for the ranks, which start after the daemon: start-up and liveness ask /healthz. Five minutes, since the
# first start in a pod compiles the counters' kernels: seconds on a free core, more on a busy one.
startupProbe:
  httpGet:
    path: /healthz
    port: metrics
  periodSeconds: 2
  failureThreshold: 150
livenessProbe:
  httpGet:
    path: /healthz
    port: metrics
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- if eq $values.shape "standalone" }}
readinessProbe:
  httpGet:
    # A stand-by is not ready for ranks, but as good as it gets: a rollout or a drain must not wait for more.
    path: {{ ternary "/healthz" "/readyz" (eq (include "flexd.highlyAvailable" .root) "true") }}
    port: metrics
  periodSeconds: 10
  timeoutSeconds: 5
{{- end }}
resources:
  {{- toYaml $values.resources | nindent 2 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  # The whole directory: the kubelet never updates a file mounted by subPath, and `flexd reload` would read the old one.
  - name: flexd-config
    mountPath: /etc/flexd/config
    readOnly: true
  {{- if .leader }}
  - name: flexd-control
    mountPath: /etc/flexd/control
    readOnly: true
  {{- if $values.control.tls.existingSecret }}
  - name: flexd-control-tls
    mountPath: /etc/flexd/control-tls
    readOnly: true
  {{- end }}
  {{- end }}
  {{- if include "flexd.withFollowers" .root }}
  - name: flexd-scale-out
    mountPath: /etc/flexd/scale-out
    readOnly: true
  {{- end }}
  - name: flexd-state
    mountPath: /var/lib/flexd
  - name: flexd-tmp
    mountPath: /tmp
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "flexd.volumes" -}}
{{- $values := .root.Values -}}
- name: flexd-config
  configMap:
    name: {{ include "flexd.fullname" .root }}
    items:
      - key: {{ .file }}
        path: flexd.yaml
- name: flexd-control
  secret:
    secretName: {{ $values.control.existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ $values.control.secretKey }}
        path: secret
{{- if and .leader $values.control.tls.existingSecret }}
- name: flexd-control-tls
  secret:
    secretName: {{ $values.control.tls.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- if include "flexd.withFollowers" .root }}
- name: flexd-scale-out
  secret:
    secretName: {{ $values.scaleOut.existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ $values.scaleOut.secretKey }}
        path: secret
{{- end }}
- name: flexd-state
  {{- if and .leader $values.state.persistent }}
  persistentVolumeClaim:
    claimName: {{ include "flexd.fullname" .root }}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: flexd-tmp
  emptyDir:
    sizeLimit: 256Mi
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What a pod's spec has in every shape. Takes the root. */}}
{{- define "flexd.podCommon" -}}
terminationGracePeriodSeconds: {{ include "flexd.graceSeconds" . }}
securityContext:
  fsGroup: 10001
  # The default changes the owner of every file of the volume at every start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
