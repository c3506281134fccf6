-- Makes one delivery due at once, with all of its attempts before it and under its id; one that is with a dispatcher at
-- this moment is left as it is. Returns a row where there is such a delivery. Finds it by primary key and locks it.
WITH resent AS (
    UPDATE outbox_deliveries
    SET status = 'PENDING',
        failures = 0,
        next_attempt_at = now(),
        sent_at = NULL,
        failed_at = NULL
    WHERE endpoint_id = %(endpoint_id)s AND event_id = %(event_id)s AND status <> 'CLAIMED'
)
SELECT event_id
FROM outbox_deliveries
WHERE endpoint_id = %(endpoint_id)s AND event_id = %(event_id)s
