{{- /* Changes a Deployment: its image, numbers, places, Secret, and a GPU if it computes. */ -}}
{{- define "moesaic.role" }}
{{- $values := index .root.Values .name }}
{{- $pod := .found.spec.template }}
{{- $container := first $pod.spec.containers }}
{{- $registry := .root.Values.image.registry }}
{{- $image := printf "moesaic-%s:%s" .name .root.Values.image.tag }}
{{- $_ := set $container "image" (ternary (printf "%s/%s" $registry $image) $image (ne $registry "")) }}
{{- $_ = set $container "resources" (deepCopy $values.resources) }}
{{- $_ = set .found.spec "replicas" $values.replicas }}
{{- $_ = set $pod.metadata "annotations" (dict "checksum/settings" (toJson .settings | sha256sum)) }}
{{- with $values.nodeSelector }}{{- $_ = set $pod.spec "nodeSelector" . }}{{- end }}
{{- $tolerations := $values.tolerations }}
{{- $gpu := and .root.Values.gpu.enabled (has .name (list "attention" "expert")) }}
{{- if $gpu }}
{{- $limits := merge (dict .root.Values.gpu.resource 1) ($container.resources.limits | default dict) }}
{{- $_ = set $container.resources "limits" $limits }}
{{- $tolerations = append $tolerations (dict "key" .root.Values.gpu.resource "operator" "Exists") }}
{{- $_ = set $container "volumeMounts" (append $container.volumeMounts (dict "name" "kernels" "mountPath" "/var/cache/moesaic")) }}
{{- $_ = set $container.startupProbe "failureThreshold" 300 }}
{{- $claim := dict "claimName" (printf "%s-kernels" .name) }}
{{- $_ = set $pod.spec "volumes" (append $pod.spec.volumes (dict "name" "kernels" "persistentVolumeClaim" $claim)) }}
{{- $_ = set .found.spec.strategy "rollingUpdate" (dict "maxSurge" 0 "maxUnavailable" 1) }}
{{- end }}
{{- with $tolerations }}{{- $_ = set $pod.spec "tolerations" . }}{{- end }}
{{- range $pod.spec.volumes }}
{{- if eq .name "secrets" }}{{- $_ = set .secret "secretName" $.root.Values.secretName }}{{- end }}
{{- if and (eq .name "model") $.root.Values.model.existingClaim }}
{{- $_ = set .persistentVolumeClaim "claimName" $.root.Values.model.existingClaim }}
{{- end }}
{{- if and $gpu (eq .name "shm") }}{{- $_ = set .emptyDir "sizeLimit" "8Gi" }}{{- end }}
{{- end }}
{{- end }}

{{- define "moesaic.redis" }}
{{- $pod := .found.spec.template }}
{{- $_ := set (first $pod.spec.containers) "image" .root.Values.redis.image }}
{{- range $pod.spec.volumes }}
{{- if eq .name "secrets" }}{{- $_ = set .secret "secretName" $.root.Values.secretName }}{{- end }}
{{- end }}
{{- $claim := first .found.spec.volumeClaimTemplates }}
{{- include "moesaic.claim" (dict "spec" $claim.spec "of" .root.Values.redis) }}
{{- end }}

{{- define "moesaic.claim" }}
{{- $_ := set .spec.resources.requests "storage" .of.size }}
{{- if .of.storageClass }}{{- $_ = set .spec "storageClassName" .of.storageClass }}{{- end }}
{{- end }}
