-- Makes an endpoint's settled deliveries due at once, from a time on and beyond a given one, the oldest first, and
-- returns their ids. Those that are still to be sent are left as they are.
--
-- An event's id begins with the time of its making by the function's clock, and `from_id` is a little before `since`
-- in that order: so the primary key finds the place, and created_at, by the database's clock, decides. Locks the rows
-- that it takes until the statement's own commit.
WITH chosen AS (
    SELECT endpoint_id, event_id
    FROM outbox_deliveries
    WHERE endpoint_id = %(endpoint_id)s AND event_id > %(from_id)s
      AND created_at >= %(since)s AND status = ANY (%(statuses)s::text[])
    ORDER BY event_id
    LIMIT %(limit)s
    FOR NO KEY UPDATE
)
UPDATE outbox_deliveries
SET status = 'PENDING',
    failures = 0,
    next_attempt_at = now(),
    sent_at = NULL,
    failed_at = NULL
FROM chosen
WHERE outbox_deliveries.endpoint_id = chosen.endpoint_id AND outbox_deliveries.event_id = chosen.event_id
RETURNING outbox_deliveries.event_id
