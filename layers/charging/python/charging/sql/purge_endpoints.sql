-- Removes endpoints that were deleted longer ago than the retention, with their deliveries, which nobody can see any more:
-- up to a limit of deliveries in all, and an endpoint once it has none. Returns how many rows were removed.
--
-- By then no charge can be under way that still saw the endpoint. Uses webhook_endpoints_deleted and the deliveries'
-- primary key; waits for nobody. Locks its rows until the statement's own commit.
WITH deleted AS (
    SELECT id
    FROM webhook_endpoints
    WHERE deleted_at < now() - make_interval(hours => 24 * %(retention_days)s)
    ORDER BY deleted_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
past AS (
    SELECT delivery.place
    FROM deleted
    CROSS JOIN LATERAL (
        SELECT ctid AS place
        FROM outbox_deliveries
        WHERE endpoint_id = deleted.id
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) AS delivery
    LIMIT %(limit)s
),
purged AS (
    DELETE FROM outbox_deliveries
    WHERE ctid = ANY (ARRAY(SELECT place FROM past))
    RETURNING 1
),
forgotten AS (
    DELETE FROM webhook_endpoints
    USING deleted
    WHERE webhook_endpoints.id = deleted.id
      AND NOT EXISTS (SELECT FROM outbox_deliveries WHERE endpoint_id = deleted.id)
    RETURNING 1
)
SELECT (SELECT count(*) FROM purged) + (SELECT count(*) FROM forgotten) AS removed
