-- Removes deliveries that were sent longer ago than their retention, up to a limit, the oldest first, with their
-- attempts, and returns how many. What is still to be sent stays, and so does what was given up, which its owner can have
-- sent again.
--
-- Uses the partial index outbox_deliveries_sent, deletes by place, waits for nobody and keeps what is to be sent again
-- since the snapshot, as purge_keys.sql does. Locks its rows until the statement's own commit.
WITH past AS (
    SELECT ctid AS place
    FROM outbox_deliveries
    WHERE status = 'SENT' AND sent_at < now() - make_interval(hours => 24 * %(retention_days)s)
    ORDER BY sent_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
purged AS (
    DELETE FROM outbox_deliveries
    WHERE ctid = ANY (ARRAY(SELECT place FROM past))
    RETURNING 1
)
SELECT count(*)
FROM purged
