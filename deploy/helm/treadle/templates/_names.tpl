{{- define "treadle.selector" -}}
app.kubernetes.io/name: treadle
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "treadle.labels" -}}
{{ include "treadle.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "treadle.name" -}}
{{- if contains "treadle" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-treadle{{ end }}
{{- end }}

{{- define "treadle.claim" -}}
{{ .Values.persistence.existingClaim | default (printf "%s-models" (include "treadle.name" .)) }}
{{- end }}
