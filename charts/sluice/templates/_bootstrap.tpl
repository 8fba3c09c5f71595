{{/* What `python -m sluice_operator.xds.bootstrap` prints; a test compares the two. */}}
{{- define "sluice.bootstrap" -}}
node: {id: gateway, cluster: sluice-gateway}
# For the pod itself alone.
admin:
  address: {socket_address: {address: 127.0.0.1, port_value: 9901}}
dynamic_resources:
  ads_config:
    api_type: GRPC
    transport_api_version: V3
    set_node_on_first_message_only: true
    grpc_services:
      - envoy_grpc:
          cluster_name: sluice-operator
          retry_policy: {retry_back_off: {base_interval: 0.1s, max_interval: 1s}}
  cds_config: {ads: {}, resource_api_version: V3}
  lds_config: {ads: {}, resource_api_version: V3}
layered_runtime:
  layers:
    - name: limits
      static_layer: {re2.max_program_size.error_level: 1000000}
    # Weights travel in this layer. Its TTL is what sends traffic back to stable when the operator is gone.
    - name: sluice
      rtds_layer:
        name: sluice
        rtds_config: {ads: {}, resource_api_version: V3}
static_resources:
  # Readiness and metrics, and nothing else of the administration.
  listeners:
    - name: ops
      address: {socket_address: {address: 0.0.0.0, port_value: 8082}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: ops
                route_config:
                  virtual_hosts:
                    - name: ops
                      domains: ["*"]
                      routes:
                        {{- range list (list "/readyz" "/ready") (list "/metrics" "/stats/prometheus") }}
                        - match:
                            path: {{ index . 0 }}
                            headers: [{name: ":method", string_match: {exact: GET}}]
                          route: {cluster: sluice-admin, prefix_rewrite: {{ index . 1 }}}
                        {{- end }}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
    - name: sluice-admin
      type: STATIC
      connect_timeout: 1s
      load_assignment:
        cluster_name: sluice-admin
        endpoints:
          - lb_endpoints:
              - endpoint:
                  address:
                    socket_address: {address: 127.0.0.1, port_value: 9901}
    {{- range $cluster := list "sluice-operator" "sluice-als" }}
    - name: {{ $cluster }}
      type: STRICT_DNS
      connect_timeout: 1s
      dns_refresh_rate: 2s
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config:
            http2_protocol_options:
              connection_keepalive: {interval: 3s, timeout: 2s}
      load_assignment:
        cluster_name: {{ $cluster }}
        endpoints:
          - lb_endpoints:
              - endpoint:
                  address:
                    socket_address: {address: {{ include "sluice.operatorHost" $ }}, port_value: 18000}
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          sni: {{ include "sluice.operatorHost" $ }}
          common_tls_context:
            tls_certificates:
              - certificate_chain: {filename: /etc/envoy/tls/tls.crt}
                private_key: {filename: /etc/envoy/tls/tls.key}
            validation_context:
              trusted_ca: {filename: /etc/envoy/tls/ca.crt}
              match_typed_subject_alt_names:
                - san_type: DNS
                  matcher: {exact: {{ include "sluice.operatorHost" $ }}}
    {{- end }}
{{- end }}
