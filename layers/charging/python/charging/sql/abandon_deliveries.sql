-- Gives up deliveries to endpoints that are there no more, whether marked as deleted or removed altogether, and returns
-- them. One that is with a dispatcher at this moment is left to it.
--
-- Steps through all endpoints as the claim does (%(after)s is below every id). Locks the rows that it takes until the
-- statement's own commit, and skips those that another is taking.
WITH RECURSIVE
\ir parts/step_through_endpoints.sql
orphaned AS (
    SELECT delivery.endpoint_id, delivery.event_id
    FROM waiting
    CROSS JOIN LATERAL (
        SELECT outbox_deliveries.endpoint_id, outbox_deliveries.event_id
        FROM outbox_deliveries
        WHERE outbox_deliveries.endpoint_id = waiting.endpoint_id
          AND status IN ('PENDING', 'CLAIMED', 'RETRY')
          AND (status <> 'CLAIMED' OR next_attempt_at <= now())
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) AS delivery
    WHERE NOT EXISTS (
        SELECT FROM webhook_endpoints WHERE id = waiting.endpoint_id AND deleted_at IS NULL
    )
    LIMIT %(limit)s
)
UPDATE outbox_deliveries
SET status = 'FAILED',
    failed_at = now(),
    last_error = 'The endpoint was deleted.'
FROM orphaned
WHERE outbox_deliveries.endpoint_id = orphaned.endpoint_id AND outbox_deliveries.event_id = orphaned.event_id
RETURNING outbox_deliveries.event_id
