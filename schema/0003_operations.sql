-- The order of an aggregate's events, and what maintenance and operators need.

-- An event's place among those of its aggregate, given to it by the transaction that holds the aggregate's row: so the
-- order of the places is the order of the commits, which no clock can promise. The constraint's index also finds an
-- aggregate's events, for an operator and for the reconciliation.
ALTER TABLE outbox
    ADD COLUMN sequence integer NOT NULL DEFAULT 1,
    ADD CONSTRAINT outbox_sequence_is_positive CHECK (sequence > 0),
    ADD CONSTRAINT outbox_places_are_taken_once UNIQUE (aggregate_id, sequence);

-- What the purges look for, oldest first. A purge that had to read the table would slow down as history grows.
CREATE INDEX outbox_published ON outbox (published_at) WHERE published_at IS NOT NULL;
CREATE INDEX idempotency_keys_expiring ON idempotency_keys (expires_at) WHERE status = 'COMPLETED';
CREATE INDEX processed_events_by_age ON processed_events (processed_at);

-- This service commits no such row; one that is there is counted at no cost to those that are not.
CREATE INDEX idempotency_keys_started ON idempotency_keys (created_at) WHERE status = 'STARTED';

-- The reconciliation reads charges by time. They are only ever added, so a few bytes for each range of pages are enough.
CREATE INDEX charges_by_age ON charges USING brin (created_at) WITH (autosummarize = on);

-- Up to when each charge is known to have, or to lack, its outbox row. One row.
CREATE TABLE reconciliation (
    is_the_only_row boolean     NOT NULL DEFAULT true,
    checked_until   timestamptz NOT NULL,
    CONSTRAINT reconciliation_pkey PRIMARY KEY (is_the_only_row),
    CONSTRAINT reconciliation_has_one_row CHECK (is_the_only_row)
);

-- Charges that were found without an outbox row. One stays here until its event is there, or an operator deletes it.
CREATE TABLE charges_without_outbox (
    charge_id uuid        NOT NULL,
    found_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT charges_without_outbox_pkey PRIMARY KEY (charge_id)
);

-- What operators did to the outbox, written in the transaction that did it. Never deleted by this service.
CREATE TABLE operator_actions (
    id        uuid        NOT NULL,
    taken_at  timestamptz NOT NULL DEFAULT now(),
    operator  text        NOT NULL, -- as they named themselves; who invoked the function is in CloudTrail
    action    text        NOT NULL,
    reason    text        NOT NULL,
    selection jsonb       NOT NULL, -- what was asked for
    event_ids uuid[]      NOT NULL, -- what was changed
    CONSTRAINT operator_actions_pkey PRIMARY KEY (id),
    CONSTRAINT operator_actions_action_is_known CHECK (action IN ('park', 'redrive')),
    CONSTRAINT operator_actions_operator_has_1_to_128_characters CHECK (char_length(operator) BETWEEN 1 AND 128),
    CONSTRAINT operator_actions_reason_has_1_to_500_characters CHECK (char_length(reason) BETWEEN 1 AND 500)
);
