-- Removes events that were published longer ago than their retention, up to a limit, the oldest first, and returns how
-- many. What is not published, or is parked, stays for as long as it takes.
--
-- Uses the partial index outbox_published, deletes by place, waits for nobody and keeps what was redriven since the
-- snapshot, as purge_keys.sql does. Locks its rows until the statement's own commit. A day is 24 hours, since in a
-- session's time zone now and then one is not.
WITH past AS (
    SELECT ctid AS place
    FROM outbox
    WHERE published_at < now() - make_interval(hours => 24 * %(retention_days)s)
    ORDER BY published_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
purged AS (
    DELETE FROM outbox
    WHERE ctid = ANY (ARRAY(SELECT place FROM past))
    RETURNING 1
)
SELECT count(*)
FROM purged
