-- Removes keys whose time is over, up to a limit, those first that have been over longest, and returns how many. Never a
-- STARTED one: only an operator knows what became of its work.
--
-- Uses the partial index idempotency_keys_expiring, and deletes by place (ctid), so that no statistics can make it read
-- the table. Waits for nobody: a row that another transaction holds is left for the next run. A row that was taken over
-- since the snapshot is looked at anew when it is locked, and kept. Locks its rows until the statement's own commit: who
-- takes one of these keys over meanwhile waits for that, and then claims the key as a new one.
WITH past AS (
    SELECT ctid AS place
    FROM idempotency_keys
    WHERE status = 'COMPLETED' AND expires_at <= now()
    ORDER BY expires_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
purged AS (
    DELETE FROM idempotency_keys
    WHERE ctid = ANY (ARRAY(SELECT place FROM past))
    RETURNING 1
)
SELECT count(*)
FROM purged
