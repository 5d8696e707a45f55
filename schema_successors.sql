CREATE TABLE idempotency_successors (
    old_tenant    text COLLATE "C" NOT NULL,
    old_principal text COLLATE "C" NOT NULL, -- empty: every caller of the tenant
    new_tenant    text COLLATE "C" NOT NULL,
    new_principal text COLLATE "C" NOT NULL,
    begins_at     timestamptz NOT NULL,      -- when every process knows it
    ends_at       timestamptz NOT NULL,
    PRIMARY KEY (old_tenant, old_principal, new_tenant, new_principal)
);
