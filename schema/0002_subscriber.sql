-- What the subscriber keeps: the events that it has seen, and its projection of them.

CREATE TABLE processed_events (
    consumer     text        NOT NULL,
    event_id     uuid        NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT processed_events_pkey PRIMARY KEY (consumer, event_id)
);

CREATE TABLE charge_totals (
    principal    text   NOT NULL,
    currency     text   NOT NULL,
    day          date   NOT NULL, -- UTC
    charges      bigint NOT NULL,
    amount_cents bigint NOT NULL,
    CONSTRAINT charge_totals_pkey PRIMARY KEY (principal, currency, day),
    CONSTRAINT charge_totals_charges_is_positive CHECK (charges > 0),
    CONSTRAINT charge_totals_amount_is_positive CHECK (amount_cents > 0)
);
