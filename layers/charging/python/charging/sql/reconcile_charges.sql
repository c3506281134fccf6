-- Checks the charges of the next slice of time for their ChargeCreated, reports those that have none, and moves the
-- watermark, all in one. Returns how many it checked and whether there is more; no row where all is checked, or where
-- another run is at it.
--
-- A slice ends before whatever may still be uncommitted. It begins no earlier than what the purge has to leave alone: the
-- event of an older charge may have been removed rightly. That bound, too, is later by the settling time, since a purge
-- may have begun after this statement's own now() and ended before its snapshot.
--
-- Finds the charges by the BRIN index charges_by_age, and asks the index of outbox_places_are_taken_once for each of
-- them: LATERAL and LIMIT see to that, where a join would be free to read the whole outbox. Locks the watermark until the
-- statement's own commit, and waits for nobody. (LIMIT 1 tells the planner that there is one.)
WITH watermark AS (
    SELECT
        greatest(
            checked_until,
            now() - make_interval(hours => 24 * %(retention_days)s) + make_interval(secs => %(settled_seconds)s)
        ) AS since,
        now() - make_interval(secs => %(settled_seconds)s) AS settled
    FROM reconciliation
    LIMIT 1
    FOR UPDATE SKIP LOCKED
),
slice AS (
    SELECT since, least(since + make_interval(secs => %(slice_seconds)s), settled) AS until, settled
    FROM watermark
    WHERE since < settled
),
checked AS (
    SELECT charges.id, event.is_there
    FROM slice
    JOIN charges ON created_at >= since AND created_at < until
    LEFT JOIN LATERAL (
        SELECT true AS is_there
        FROM outbox
        WHERE aggregate_id = charges.id AND event_type = 'ChargeCreated'
        LIMIT 1
    ) AS event ON true
),
reported AS (
    INSERT INTO charges_without_outbox (charge_id)
    SELECT id
    FROM checked
    WHERE is_there IS NULL
    ON CONFLICT (charge_id) DO NOTHING
),
moved AS (
    UPDATE reconciliation
    SET checked_until = until
    FROM slice
)
SELECT (SELECT count(*) FROM checked) AS charges, until < settled AS is_followed
FROM slice
