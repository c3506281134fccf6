-- Whether the outbox has each event of the step `expected`, by its place and type, as the step `checked`: `is_there` is null
-- for one that is missing. Asks the index of outbox_places_are_taken_once for each of them: LATERAL and LIMIT see to that,
-- where a join would be free to read the whole outbox.
checked AS (
    SELECT aggregate_id, sequence, event_type, event.is_there
    FROM expected
    LEFT JOIN LATERAL (
        SELECT true AS is_there
        FROM outbox
        WHERE outbox.aggregate_id = expected.aggregate_id AND outbox.sequence = expected.sequence
          AND outbox.event_type = expected.event_type
        LIMIT 1
    ) AS event ON true
),
