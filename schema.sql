CREATE TABLE idempotency_records (
    scope_version     text COLLATE "C" NOT NULL,
    tenant_id         text COLLATE "C" NOT NULL,
    principal_id      text COLLATE "C" NOT NULL,
    route             text COLLATE "C" NOT NULL,
    ns                text COLLATE "C" NOT NULL, -- u: keys that clients sent, s: keys that the server minted
    idem_key          text COLLATE "C" NOT NULL,
    fingerprint       bytea NOT NULL,            -- the scheme in one byte, and the digest
    status            text NOT NULL,             -- in_progress, completed or released; a CHECK would be parsed for each write
    held              boolean NOT NULL,          -- not to be taken over when its lease has ended
    owner             uuid NOT NULL,             -- of the claim that won last
    attempt           integer NOT NULL,
    lease_expires_at  timestamptz NOT NULL,      -- without an index, so that completing stays a HOT update
    response_code     integer,
    response_headers  bytea,
    response_trailers bytea,
    response_body     bytea,
    not_replayable    boolean NOT NULL DEFAULT false,
    created_at        timestamptz NOT NULL,
    expires_at        timestamptz NOT NULL,      -- changed by claims only, for the same reason
    PRIMARY KEY (scope_version, tenant_id, principal_id, route, ns, idem_key)
) WITH (
    fillfactor = 50,                             -- room for the completed version beside the claimed one
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05
);

CREATE INDEX ON idempotency_records (expires_at);

-- lz4 where the server is built with it.
DO $$
BEGIN
    ALTER TABLE idempotency_records ALTER COLUMN response_body SET COMPRESSION lz4;
EXCEPTION WHEN feature_not_supported THEN
    NULL;
END
$$;
