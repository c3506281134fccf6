-- Webhooks: where principals want their events sent, and each event's way there.

-- No secret is kept here: one is derived from a master key outside the database, the endpoint's id and its version.
CREATE TABLE webhook_endpoints (
    id                   uuid        NOT NULL,
    principal            text        NOT NULL,
    url                  text        NOT NULL,
    event_types          text[]      NOT NULL,
    secret_version       integer     NOT NULL DEFAULT 1,
    previous_signs_until timestamptz, -- until then the version before it signs, too
    created_at           timestamptz NOT NULL DEFAULT now(),
    disabled_at          timestamptz, -- its deliveries are still written, and held
    disabled_reason      text,
    deleted_at           timestamptz, -- kept until its last delivery is gone, since the charge's statement locks no endpoint
    failures_in_a_row    integer     NOT NULL DEFAULT 0,
    opened_at            timestamptz, -- since then the breaker is open: one probe at a time, and nothing else
    resumes_at           timestamptz, -- nothing is sent before: a pause that the receiver asked for, or the next probe
    CONSTRAINT webhook_endpoints_pkey PRIMARY KEY (id),
    CONSTRAINT webhook_endpoints_principal_has_1_to_1024_bytes CHECK (octet_length(principal) BETWEEN 1 AND 1024),
    CONSTRAINT webhook_endpoints_url_has_1_to_2048_characters CHECK (char_length(url) BETWEEN 1 AND 2048),
    CONSTRAINT webhook_endpoints_wants_1_to_20_event_types CHECK (cardinality(event_types) BETWEEN 1 AND 20),
    CONSTRAINT webhook_endpoints_secret_version_is_positive CHECK (secret_version > 0),
    CONSTRAINT webhook_endpoints_is_disabled_for_a_reason CHECK (num_nulls(disabled_at, disabled_reason) IN (0, 2)),
    CONSTRAINT webhook_endpoints_disabled_reason_is_known CHECK (disabled_reason IN ('owner', 'gone')),
    CONSTRAINT webhook_endpoints_failures_in_a_row_is_not_negative CHECK (failures_in_a_row >= 0),
    CONSTRAINT webhook_endpoints_open_has_a_next_probe CHECK (opened_at IS NULL OR resumes_at IS NOT NULL)
);

-- What a charge asks for, and what the API lists.
CREATE INDEX webhook_endpoints_of_principal ON webhook_endpoints (principal, id) WHERE deleted_at IS NULL;
-- Few, and asked for every second.
CREATE INDEX webhook_endpoints_open ON webhook_endpoints (resumes_at) WHERE opened_at IS NOT NULL;
-- What maintenance removes in the end.
CREATE INDEX webhook_endpoints_deleted ON webhook_endpoints (deleted_at) WHERE deleted_at IS NOT NULL;

-- One row for each event and endpoint, written in the event's own transaction.
--
--   PENDING  not tried yet
--   CLAIMED  with a dispatcher, until next_attempt_at: the lease's end, at which it is due again by itself
--   RETRY    tried, and due again at next_attempt_at
--   SENT     the receiver answered 2xx
--   FAILED   given up, and kept: it can be sent again
--
-- `attempts` counts the claims and is the fencing number that a completion must match; `failures` counts the attempts
-- that are held against the delivery, of which it has eight. An event's id begins with the time of its making, so
-- the primary key is also the order in which an endpoint's deliveries are listed.
--
-- There is no foreign key to the endpoint: checking it would write to the endpoint's row for each charge.
CREATE TABLE outbox_deliveries (
    endpoint_id     uuid        NOT NULL,
    event_id        uuid        NOT NULL,
    event_type      text        NOT NULL,
    aggregate_id    uuid        NOT NULL,
    sequence        integer     NOT NULL,
    -- Its own copy: the outbox forgets a published event long before a delivery is given up, and few principals have
    -- more than one endpoint.
    payload         text        NOT NULL,
    status          text        NOT NULL DEFAULT 'PENDING',
    attempts        integer     NOT NULL DEFAULT 0,
    failures        integer     NOT NULL DEFAULT 0,
    next_attempt_at timestamptz NOT NULL DEFAULT now(),
    last_error      text,
    created_at      timestamptz NOT NULL DEFAULT now(),
    sent_at         timestamptz,
    failed_at       timestamptz,
    CONSTRAINT outbox_deliveries_pkey PRIMARY KEY (endpoint_id, event_id),
    -- Not by the endpoint first: it would offer itself, in place of the primary key, for single deliveries of an endpoint.
    CONSTRAINT outbox_deliveries_dedupe_key UNIQUE (aggregate_id, endpoint_id, event_type, sequence),
    CONSTRAINT outbox_deliveries_status_is_known
        CHECK (status IN ('PENDING', 'CLAIMED', 'RETRY', 'SENT', 'FAILED')),
    CONSTRAINT outbox_deliveries_attempts_is_not_negative CHECK (attempts >= 0),
    CONSTRAINT outbox_deliveries_failures_is_not_negative CHECK (failures >= 0),
    CONSTRAINT outbox_deliveries_sent_says_when CHECK ((status = 'SENT') = (sent_at IS NOT NULL)),
    CONSTRAINT outbox_deliveries_failed_says_when CHECK ((status = 'FAILED') = (failed_at IS NOT NULL))
) WITH (
    -- Each delivery is rewritten twice at the least, and a claim steps over what that leaves in outbox_deliveries_open.
    autovacuum_vacuum_scale_factor = 0.01,
    vacuum_index_cleanup = on
);

-- What is still to be sent, by endpoint: a claim steps from one endpoint to the next, and takes a few of each.
CREATE INDEX outbox_deliveries_open ON outbox_deliveries (endpoint_id, next_attempt_at, event_id)
    WHERE status IN ('PENDING', 'CLAIMED', 'RETRY');
-- What the purge looks for.
CREATE INDEX outbox_deliveries_sent ON outbox_deliveries (sent_at) WHERE status = 'SENT';

-- What became of a delivery's last attempts, for the endpoint's owner. An attempt has an HTTP status, or an error where
-- no answer came.
CREATE TABLE delivery_attempts (
    endpoint_id  uuid        NOT NULL,
    event_id     uuid        NOT NULL,
    attempt      integer     NOT NULL,
    ended_at     timestamptz NOT NULL DEFAULT now(),
    duration_ms  integer     NOT NULL,
    status       smallint,
    error        text,
    excerpt      text, -- how the answer's body begins
    CONSTRAINT delivery_attempts_pkey PRIMARY KEY (endpoint_id, event_id, attempt),
    CONSTRAINT delivery_attempts_belongs_to_a_delivery FOREIGN KEY (endpoint_id, event_id)
        REFERENCES outbox_deliveries (endpoint_id, event_id) ON DELETE CASCADE,
    CONSTRAINT delivery_attempts_duration_is_not_negative CHECK (duration_ms >= 0),
    CONSTRAINT delivery_attempts_error_has_at_most_500_characters CHECK (char_length(error) <= 500),
    CONSTRAINT delivery_attempts_excerpt_has_at_most_500_characters CHECK (char_length(excerpt) <= 500)
);
