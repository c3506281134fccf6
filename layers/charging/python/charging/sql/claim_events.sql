-- Leases the events that have been due longest: charges the attempt and pushes the row past the lease.
-- A row whose lease has ended is simply due again, so what a dead relay held comes back by itself.
--
-- Uses the partial index outbox_due, from `since` on where that is given: what has come to be due before that is not looked
-- at, nor stepped over. Locks the rows it takes until the statement's own commit and skips
-- rows that another relay is taking at this moment.
WITH due AS (
    SELECT id, next_attempt_at
    FROM outbox
    WHERE published_at IS NULL AND failed_at IS NULL AND next_attempt_at <= now()
      AND next_attempt_at >= COALESCE(%(since)s::timestamptz, '-infinity')
    ORDER BY next_attempt_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
UPDATE outbox
SET attempts = mod(attempts, 2147483647) + 1,
    next_attempt_at = now() + make_interval(secs => %(lease_seconds)s)
FROM due
WHERE outbox.id = due.id
RETURNING
    outbox.id, outbox.event_type, outbox.aggregate_id, outbox.payload, outbox.attempts, outbox.refusals,
    due.next_attempt_at AS due_at
