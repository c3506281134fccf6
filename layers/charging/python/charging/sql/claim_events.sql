-- Leases the events that have been due longest.
--
-- Uses the partial index outbox_due, from `since` on where that is given: what has come to be due before that is not looked
-- at, nor stepped over. Locks the rows it takes until the statement's own commit and skips rows that another relay is taking
-- at this moment.
WITH due AS (
    SELECT id, next_attempt_at
    FROM outbox
    WHERE published_at IS NULL AND failed_at IS NULL AND next_attempt_at <= now()
      AND next_attempt_at >= COALESCE(%(since)s::timestamptz, '-infinity')
    ORDER BY next_attempt_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
\ir parts/lease_events.sql
