-- Makes one delivery due at once, with all of its attempts before it and under its id; one that is with a dispatcher at
-- this moment is left as it is. Returns a row where there is such a delivery. Finds it by primary key and locks it first:
-- one that the maintenance removes at this moment is not there, though the snapshot still has it.
WITH delivery AS MATERIALIZED (
    SELECT endpoint_id, event_id, status
    FROM outbox_deliveries
    WHERE endpoint_id = %(endpoint_id)s AND event_id = %(event_id)s
    FOR NO KEY UPDATE
),
resent AS (
    UPDATE outbox_deliveries
    SET status = 'PENDING',
        failures = 0,
        next_attempt_at = now(),
        sent_at = NULL,
        failed_at = NULL
    FROM delivery
    WHERE outbox_deliveries.endpoint_id = delivery.endpoint_id
      AND outbox_deliveries.event_id = delivery.event_id
      AND delivery.status <> 'CLAIMED'
)
SELECT event_id
FROM delivery
