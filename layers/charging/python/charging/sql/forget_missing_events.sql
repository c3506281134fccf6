-- Takes events off the list of those that are missing that have come since, and returns how many. Looks at the first ones
-- on the list up to a limit: once those are settled, the next ones are the first.
--
-- Locks the rows that it looks at until the statement's own commit, and skips those that somebody else holds. Asks the
-- index of outbox_places_are_taken_once for each of them.
WITH looked_at AS (
    SELECT aggregate_id, sequence, event_type
    FROM missing_events
    ORDER BY aggregate_id, sequence
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
found AS (
    SELECT aggregate_id, sequence
    FROM looked_at
    JOIN LATERAL (
        SELECT
        FROM outbox
        WHERE outbox.aggregate_id = looked_at.aggregate_id AND outbox.sequence = looked_at.sequence
          AND outbox.event_type = looked_at.event_type
        LIMIT 1
    ) AS event ON true
),
forgotten AS (
    DELETE FROM missing_events
    WHERE (aggregate_id, sequence) IN (SELECT aggregate_id, sequence FROM found)
    RETURNING 1
)
SELECT count(*)
FROM forgotten
