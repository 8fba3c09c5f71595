{{/* Name of the release's objects: the release's name, with the chart's where it says nothing of it. */}}
{{- define "sluice.name" -}}
{{- if contains "sluice" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-sluice" .Release.Name }}{{ end -}}
{{- end }}

{{- define "sluice.operator" -}}{{ include "sluice.name" . | trunc 54 | trimSuffix "-" }}-operator{{- end }}
{{- define "sluice.gateway" -}}{{ include "sluice.name" . | trunc 54 | trimSuffix "-" }}-gateway{{- end }}

{{/* The name by which the gateway knows the operator, also in its certificate. */}}
{{- define "sluice.operatorHost" -}}{{ include "sluice.operator" . }}.{{ .Release.Namespace }}.svc{{- end }}

{{- define "sluice.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/name: sluice
app.kubernetes.io/part-of: sluice
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "sluice.image" -}}{{ .repository }}:{{ .tag }}{{- end }}

{{/* Watched namespaces as a JSON list; empty means all. */}}
{{- define "sluice.namespaces" -}}
{{- if .Values.watchAllNamespaces }}
{{- if .Values.watchNamespaces }}{{ fail "watchNamespaces must be empty with watchAllNamespaces: true" }}{{ end -}}
[]
{{- else }}{{ .Values.watchNamespaces | default (list .Release.Namespace) | toJson }}{{ end -}}
{{- end }}

{{/* Annotations of what `helm uninstall` does last; the argument orders it. */}}
{{- define "sluice.lastHook" -}}
helm.sh/hook: post-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- define "sluice.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "sluice.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "sluice.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "sluice.operatorTls" -}}{{ .Values.tls.operatorSecret | default (printf "%s-tls" (include "sluice.operator" .)) }}{{- end }}
{{- define "sluice.gatewayTls" -}}{{ .Values.tls.gatewaySecret | default (printf "%s-tls" (include "sluice.gateway" .)) }}{{- end }}

{{/*
Certificates as JSON: {operator: {…}, gateway: {…}}, data of the two Secrets. Made once per rendering and then read from the
values, so that Secrets and checksums speak of the same ones; what the cluster holds is kept, but only as a pair, since the
authority's key is not kept.
*/}}
{{- define "sluice.certificates" -}}
{{- if not (hasKey .Values "certificatesOfThisRendering") }}
{{- $operator := lookup "v1" "Secret" .Release.Namespace (include "sluice.operatorTls" .) }}
{{- $gateway := lookup "v1" "Secret" .Release.Namespace (include "sluice.gatewayTls" .) }}
{{- if and $operator $gateway }}
{{- $_ := set .Values "certificatesOfThisRendering" (dict "operator" $operator.data "gateway" $gateway.data) }}
{{- else }}
{{- $days := int .Values.tls.validityDays }}
{{- $host := include "sluice.operatorHost" . }}
{{- $authority := genCA (printf "%s authority" (include "sluice.name" .)) $days }}
{{- $o := genSignedCert $host nil (list $host (include "sluice.operator" .) (printf "%s.cluster.local" $host)) $days $authority }}
{{- $g := genSignedCert (include "sluice.gateway" .) nil (list (include "sluice.gateway" .)) $days $authority }}
{{- $ca := $authority.Cert | b64enc }}
{{- $made := dict
  "operator" (dict "tls.crt" ($o.Cert | b64enc) "tls.key" ($o.Key | b64enc) "ca.crt" $ca)
  "gateway" (dict "tls.crt" ($g.Cert | b64enc) "tls.key" ($g.Key | b64enc) "ca.crt" $ca) }}
{{- $_ := set .Values "certificatesOfThisRendering" $made }}
{{- end }}
{{- end }}
{{- .Values.certificatesOfThisRendering | toJson }}
{{- end }}
