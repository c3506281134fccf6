-- Whatever event should be there is looked for, refunds' too, and not charges' own alone.

-- Events that were found to be missing, by their places. One stays here until it is there, or an operator deletes its row.
CREATE TABLE missing_events (
    aggregate_id uuid        NOT NULL,
    sequence     integer     NOT NULL,
    event_type   text        NOT NULL,
    found_at     timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT missing_events_pkey PRIMARY KEY (aggregate_id, sequence)
);

-- In place of charges_without_outbox, which the release before still uses: a later file removes it.
INSERT INTO missing_events (aggregate_id, sequence, event_type, found_at)
SELECT charge_id, 1, 'ChargeCreated', found_at
FROM charges_without_outbox;

-- The reconciliation reads refunds by time, as it does charges.
CREATE INDEX refunds_by_age ON refunds USING brin (created_at) WITH (autosummarize = on);
