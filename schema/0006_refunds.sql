-- Refunds: of a charge there may be several, together never more than it.

-- Both are counted in the charge's own row: whoever refunds locks it, and so reads what the one before has left.
ALTER TABLE charges
    ADD COLUMN refunded_cents bigint  NOT NULL DEFAULT 0,
    ADD COLUMN refunds        integer NOT NULL DEFAULT 0,
    -- Not valid yet: checking every charge there is would keep the table from everybody for as long. See the next file.
    ADD CONSTRAINT charges_refunded_is_at_most_the_amount CHECK (refunded_cents BETWEEN 0 AND amount_cents) NOT VALID;

CREATE TABLE refunds (
    id           uuid        NOT NULL,
    charge_id    uuid        NOT NULL,
    number       integer     NOT NULL, -- among its charge's refunds, in the order of their commits
    amount_cents bigint      NOT NULL,
    reference    text,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(), -- later than that of the one before, which it waited for
    CONSTRAINT refunds_pkey PRIMARY KEY (id),
    CONSTRAINT refunds_are_numbered_by_charge UNIQUE (charge_id, number),
    CONSTRAINT refunds_number_is_positive CHECK (number > 0),
    CONSTRAINT refunds_amount_is_positive CHECK (amount_cents > 0),
    CONSTRAINT refunds_reference_has_1_to_64_characters CHECK (char_length(reference) BETWEEN 1 AND 64),
    CONSTRAINT refunds_belong_to_a_charge FOREIGN KEY (charge_id) REFERENCES charges (id)
);

-- A refund may have waited for the one before it. Its event is due when it is written, and not when its transaction began:
-- a claim would not look so far back.
ALTER TABLE outbox
    ALTER COLUMN next_attempt_at SET DEFAULT clock_timestamp();

-- The subscriber's totals: what was refunded on a day, which need not be a day with charges.
ALTER TABLE charge_totals
    ADD COLUMN refunds        bigint NOT NULL DEFAULT 0,
    ADD COLUMN refunded_cents bigint NOT NULL DEFAULT 0,
    DROP CONSTRAINT charge_totals_charges_is_positive,
    DROP CONSTRAINT charge_totals_amount_is_positive,
    ADD CONSTRAINT charge_totals_charges_come_to_an_amount
        CHECK (charges >= 0 AND (charges > 0) = (amount_cents > 0) AND amount_cents >= 0),
    ADD CONSTRAINT charge_totals_refunds_come_to_an_amount
        CHECK (refunds >= 0 AND (refunds > 0) = (refunded_cents > 0) AND refunded_cents >= 0);
