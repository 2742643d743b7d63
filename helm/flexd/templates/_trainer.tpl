{{/*
The spec of one trainer pod. Takes (dict "root" $ "first" BOOL "kind" KIND): the first pod has the daemon; the kind is jobset or
pytorchjob.
*/}}
{{- define "flexd.trainerTemplate" -}}
{{- $values := .root.Values -}}
{{- $trainer := $values.sidecar.trainer -}}
{{- $name := ternary "pytorch" (default "trainer" $trainer.name) (eq .kind "pytorchjob") -}}
metadata:
  labels:
    {{- include "flexd.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ ternary "daemon" "trainer" .first }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if eq .kind "jobset" }}
  restartPolicy: Never
  {{- end }}
  automountServiceAccountToken: false
  {{- include "flexd.podCommon" .root | nindent 2 }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .first }}
  initContainers:
    - {{ include "flexd.container" .root | nindent 6 | trim }}
  {{- end }}
  containers:
    - name: {{ $name }}
      {{- toYaml (omit $trainer "name" "env" "volumeMounts") | nindent 6 }}
      env:
        - name: FLEXD_CONTROL
          value: "{{ include "flexd.fullname" .root }}:{{ $values.control.port }}"
        - name: FLEXD_SECRET_FILE
          value: /etc/flexd/control/secret
        {{- if $values.control.tls.trainerSecret }}
        - name: FLEXD_CONTROL_CERT_FILE
          value: /etc/flexd/trainer-tls/tls.crt
        - name: FLEXD_CONTROL_KEY_FILE
          value: /etc/flexd/trainer-tls/tls.key
        - name: FLEXD_CONTROL_CA_FILE
          value: /etc/flexd/trainer-tls/ca.crt
        {{- end }}
        {{- if eq .kind "jobset" }}
        # torchrun reads its options from these.
        - name: PET_NNODES
          value: {{ $values.sidecar.nodes | quote }}
        - name: PET_RDZV_BACKEND
          value: c10d
        - name: PET_RDZV_ENDPOINT
          value: "{{ include "flexd.fullname" .root }}:{{ $values.sidecar.rendezvousPort }}"
        - name: PET_RDZV_ID
          value: {{ include "flexd.fullname" .root }}
        {{- end }}
        {{- with $trainer.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumeMounts:
        - name: flexd-control
          mountPath: /etc/flexd/control
          readOnly: true
        {{- if $values.control.tls.trainerSecret }}
        - name: flexd-trainer-tls
          mountPath: /etc/flexd/trainer-tls
          readOnly: true
        {{- end }}
        {{- with $trainer.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- if .first }}
    {{- include "flexd.volumes" .root | nindent 4 }}
    {{- else }}
    {{- include "flexd.controlVolume" .root | nindent 4 }}
    {{- end }}
    {{- if $values.control.tls.trainerSecret }}
    - name: flexd-trainer-tls
      secret:
        secretName: {{ $values.control.tls.trainerSecret }}
        defaultMode: 0444
    {{- end }}
    {{- with $values.sidecar.trainerVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
