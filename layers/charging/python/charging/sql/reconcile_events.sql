-- Asks the outbox for each event that belongs to the next slice of time, reports those that are missing, and moves the
-- watermark, all in one. Returns how many it asked for and whether there is more; no row where all is checked, or where
-- another run is at it.
--
-- A slice ends before whatever may still be uncommitted. It begins no earlier than what the purge has to leave alone: an
-- older event may have been removed rightly. That bound, too, is later by the settling time, since a purge may have begun
-- after this statement's own now() and ended before its snapshot.
--
-- Finds charges and refunds by their BRIN indexes, charges_by_age and refunds_by_age. Locks the watermark until the
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
-- What each operation announces, in the place that its own statement gives it.
expected AS (
    SELECT id AS aggregate_id, 1 AS sequence, 'ChargeCreated' AS event_type
    FROM slice
    JOIN charges ON created_at >= since AND created_at < until
    UNION ALL
    SELECT charge_id, number + 1, 'ChargeRefunded'
    FROM slice
    JOIN refunds ON created_at >= since AND created_at < until
),
\ir parts/look_for_events.sql
reported AS (
    INSERT INTO missing_events (aggregate_id, sequence, event_type)
    SELECT aggregate_id, sequence, event_type
    FROM checked
    WHERE is_there IS NULL
    ON CONFLICT (aggregate_id, sequence) DO NOTHING
),
moved AS (
    UPDATE reconciliation
    SET checked_until = until
    FROM slice
)
SELECT (SELECT count(*) FROM checked) AS checked, until < settled AS is_followed
FROM slice
