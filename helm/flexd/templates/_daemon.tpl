{{/*
The daemon's container and its volumes. All take the root.
*/}}
{{- define "flexd.container" -}}
{{- $values := .Values -}}
name: flexd
image: {{ include "flexd.image" . | quote }}
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
  - name: control
    containerPort: {{ $values.control.port }}
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
    path: /readyz
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
  - name: flexd-control
    mountPath: /etc/flexd/control
    readOnly: true
  {{- if $values.control.tls.existingSecret }}
  - name: flexd-control-tls
    mountPath: /etc/flexd/control-tls
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

{{/* The shared secret, which the trainers mount too. Takes the root. */}}
{{- define "flexd.controlVolume" -}}
- name: flexd-control
  secret:
    secretName: {{ .Values.control.existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ .Values.control.secretKey }}
        path: secret
{{- end -}}

{{- define "flexd.volumes" -}}
{{- $values := .Values -}}
- name: flexd-config
  configMap:
    name: {{ include "flexd.fullname" . }}
    items:
      - key: flexd.yaml
        path: flexd.yaml
{{ include "flexd.controlVolume" . }}
{{- if $values.control.tls.existingSecret }}
- name: flexd-control-tls
  secret:
    secretName: {{ $values.control.tls.existingSecret }}
    defaultMode: 0440
{{- end }}
- name: flexd-state
  {{- if $values.state.persistent }}
  persistentVolumeClaim:
    claimName: {{ include "flexd.fullname" . }}
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
