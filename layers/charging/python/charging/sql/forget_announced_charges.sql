-- Takes charges off the list of those without an outbox row whose ChargeCreated has come since, and returns how many.
-- Looks at the first charges of the list up to a limit: once those are settled, the next ones are the first.
--
-- Locks the charges it looks at until the statement's own commit, and skips those that somebody else holds. Asks the index
-- of outbox_places_are_taken_once for each of them.
WITH looked_at AS (
    SELECT charge_id
    FROM charges_without_outbox
    ORDER BY charge_id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
announced AS (
    SELECT charge_id
    FROM looked_at
    JOIN LATERAL (
        SELECT
        FROM outbox
        WHERE aggregate_id = charge_id AND event_type = 'ChargeCreated'
        LIMIT 1
    ) AS event ON true
),
forgotten AS (
    DELETE FROM charges_without_outbox
    WHERE charge_id IN (SELECT charge_id FROM announced)
    RETURNING 1
)
SELECT count(*)
FROM forgotten
