-- Removes what consumers noted of events longer ago than the dedupe window, up to a limit, the oldest first, and returns
-- how many.
--
-- Uses the index processed_events_by_age, deletes by place and waits for nobody, as purge_keys.sql does. Locks its rows
-- until the statement's own commit.
WITH past AS (
    SELECT ctid AS place
    FROM processed_events
    WHERE processed_at < now() - make_interval(hours => 24 * %(retention_days)s)
    ORDER BY processed_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
purged AS (
    DELETE FROM processed_events
    WHERE ctid = ANY (ARRAY(SELECT place FROM past))
    RETURNING 1
)
SELECT count(*)
FROM purged
