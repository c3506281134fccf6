-- The charge and everything that is committed with it.

CREATE TABLE charges (
    id           uuid        NOT NULL,
    principal    text        NOT NULL,
    amount_cents bigint      NOT NULL,
    currency     text        NOT NULL,
    reference    text,
    created_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT charges_pkey PRIMARY KEY (id),
    CONSTRAINT charges_principal_has_1_to_1024_bytes CHECK (octet_length(principal) BETWEEN 1 AND 1024),
    CONSTRAINT charges_amount_is_from_1_to_999999999999 CHECK (amount_cents BETWEEN 1 AND 999999999999),
    CONSTRAINT charges_currency_is_three_upper_case_letters CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT charges_reference_has_1_to_64_characters CHECK (char_length(reference) BETWEEN 1 AND 64)
);

-- One row per (principal, endpoint, key). This service writes a row only together with its result, so a
-- committed row is COMPLETED; STARTED is for an operation that would have to commit its claim before its
-- work, and such a row is never taken over by a retry: only an operator knows what became of the work.
CREATE TABLE idempotency_keys (
    principal        text        NOT NULL,
    endpoint         text        NOT NULL,
    key              uuid        NOT NULL,
    fingerprint      text        NOT NULL,
    status           text        NOT NULL,
    response_status  smallint,
    response_headers jsonb,
    response_body    text,       -- text, since jsonb would not give the same bytes back
    created_at       timestamptz NOT NULL DEFAULT now(),
    expires_at       timestamptz NOT NULL,
    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (principal, endpoint, key),
    CONSTRAINT idempotency_keys_principal_has_1_to_1024_bytes CHECK (octet_length(principal) BETWEEN 1 AND 1024),
    CONSTRAINT idempotency_keys_fingerprint_has_a_version CHECK (fingerprint ~ '^v[0-9]+:'),
    CONSTRAINT idempotency_keys_status_is_known CHECK (status IN ('STARTED', 'COMPLETED')),
    CONSTRAINT idempotency_keys_completed_has_a_response CHECK (
        status = 'STARTED' OR num_nulls(response_status, response_headers, response_body) = 0
    ),
    CONSTRAINT idempotency_keys_stores_allowed_headers_only CHECK (
        response_headers - 'Content-Type' - 'Location' = '{}'::jsonb
    ),
    -- Above about 2 kB a response leaves the row for TOAST; a result that needs 8 KiB belongs behind its Location.
    CONSTRAINT idempotency_keys_body_has_at_most_8_kib CHECK (octet_length(response_body) <= 8192),
    CONSTRAINT idempotency_keys_expires_after_creation CHECK (expires_at > created_at)
);

-- Events that are committed but perhaps not yet published. `attempts` counts the claims and is the fencing
-- number that a completion must match; `refusals` counts how often the broker refused this very event, so
-- that an outage, however long, is not held against it. `next_attempt_at` is when the row is due, and while
-- it is claimed, when the lease ends.
CREATE TABLE outbox (
    id              uuid        NOT NULL,
    event_type      text        NOT NULL,
    aggregate_id    uuid        NOT NULL,
    payload         text        NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now(),
    attempts        integer     NOT NULL DEFAULT 0,
    refusals        integer     NOT NULL DEFAULT 0,
    next_attempt_at timestamptz NOT NULL DEFAULT now(),
    last_error      text,
    published_at    timestamptz,
    failed_at       timestamptz,
    CONSTRAINT outbox_pkey PRIMARY KEY (id),
    CONSTRAINT outbox_attempts_is_not_negative CHECK (attempts >= 0),
    CONSTRAINT outbox_refusals_is_not_negative CHECK (refusals >= 0),
    CONSTRAINT outbox_is_not_both_published_and_failed CHECK (num_nonnulls(published_at, failed_at) < 2)
);

-- Only what is still to be sent, so that kept history costs the claim nothing.
CREATE INDEX outbox_due ON outbox (next_attempt_at, id) WHERE published_at IS NULL AND failed_at IS NULL;

-- Parked rows are few and are counted every minute.
CREATE INDEX outbox_failed ON outbox (failed_at) WHERE failed_at IS NOT NULL;
