module github.com/keytuple/idempotency/examples

go 1.25.0

require (
	github.com/google/uuid v1.6.0
	github.com/keytuple/idempotency v0.0.0
	github.com/stretchr/testify v1.12.1
)

require (
	github.com/dunglas/httpsfv v1.1.2 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
)

replace github.com/keytuple/idempotency => ../
