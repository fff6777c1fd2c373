{{- define "cometmq.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-cometmq" .Release.Name) (contains "cometmq" .Release.Name) -}}
{{- $name | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select the pods of a part: (list $ "broker") or (list $ "broker" "broker-a"). */}}
{{- define "cometmq.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: cometmq
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
cometmq/group: {{ index . 2 }}
{{- end }}
{{- end -}}

{{- define "cometmq.match" -}}
matchLabels: {{ include "cometmq.selector" . | nindent 2 }}
{{- end -}}

{{- define "cometmq.labels" -}}
{{- $root := index . 0 -}}
{{ include "cometmq.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* The addresses of the name servers in the Kubernetes cluster, as host:port, separated by semicolons. */}}
{{- define "cometmq.namesrv" -}}
{{- $set := printf "%s-namesrv" (include "cometmq.fullname" .) -}}
{{- $all := list -}}
{{- range $n := until (int .Values.namesrv.replicas) -}}
{{- $all = append $all (printf "%s-%d.%s:9876" $set $n (include "cometmq.domain" (list $ $set))) -}}
{{- end -}}
{{- join ";" $all -}}
{{- end -}}

{{/* The domain of the pods of a set: (list $ "name of the service"). */}}
{{- define "cometmq.domain" -}}
{{- $root := index . 0 -}}
{{- printf "%s.%s.svc.%s" (index . 1) $root.Release.Namespace $root.Values.clusterDomain -}}
{{- end -}}

{{/* An image: (list $ .Values.image). */}}
{{- define "cometmq.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
image: {{ printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{- define "cometmq.settings" -}}
{{- range $key, $value := . }}
{{ $key }}={{ $value | replace "\\" "\\\\" | replace "\n" "\\n" }}
{{- end }}
{{- end -}}

{{- define "cometmq.authSecret" -}}
{{- default (printf "%s-accounts" (include "cometmq.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{/* The account of tools and console, as environment variables. */}}
{{- define "cometmq.account" -}}
{{- if .Values.auth.enabled }}
- name: COMETMQ_ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ include "cometmq.authSecret" . }}, key: accessKey}}
- name: COMETMQ_SECRET_KEY
  valueFrom: {secretKeyRef: {name: {{ include "cometmq.authSecret" . }}, key: secretKey}}
{{- end }}
{{- end -}}

{{/* The common fields of all pods: (list $ .Values.namesrv). */}}
{{- define "cometmq.pod" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "cometmq.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* The configured affinity. Default: avoid nodes with pods of the same part: (list $ .Values.broker "broker" "broker-a"). */}}
{{- define "cometmq.affinity" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
affinity:
{{- if $part.affinity }}
  {{- toYaml $part.affinity | nindent 2 }}
{{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector: {{ include "cometmq.match" (prepend (slice . 2) $root) | nindent 14 }}
{{- end }}
{{- end -}}

{{- define "cometmq.annotations" -}}
checksum/config: {{ include (print .Template.BasePath "/config.yaml") . | sha256sum }}
{{- if .Values.metrics.annotations }}
prometheus.io/scrape: "true"
prometheus.io/port: "5557"
prometheus.io/path: /metrics
{{- end }}
{{- end -}}

{{/* A volume claim: (list "data" .Values.broker.persistence). */}}
{{- define "cometmq.claim" -}}
{{- $given := index . 1 -}}
accessModes: [ReadWriteOnce]
{{- with $given.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ $given.size }}}}
{{- end -}}
