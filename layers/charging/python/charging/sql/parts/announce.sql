-- Writes the event of what the step `effect` has done, with its time, its place among the events of its aggregate, and a
-- delivery for each of the principal's endpoints that want such events, also for a disabled one: its deliveries are held.
--
-- The endpoints are looked up by webhook_endpoints_of_principal and not locked: one that is deleted meanwhile leaves a
-- delivery that the dispatcher gives up.
event AS MATERIALIZED (
    SELECT
        sequence,
        -- The object is opened at its end for the one member that the database's clock gives it. As text: to parse it and
        -- to write it again would take longer than the rows.
        left(%(event)s::text, -1)
            || to_char(created_at AT TIME ZONE 'UTC', ',"\"time\":\""YYYY-MM-DD"T"HH24:MI:SS.US"Z\"}"') AS payload
    FROM effect
),
announced AS (
    INSERT INTO outbox (id, event_type, aggregate_id, sequence, payload)
    SELECT %(event_id)s, %(event_type)s, %(aggregate_id)s, sequence, payload
    FROM event
),
addressed AS (
    INSERT INTO outbox_deliveries (endpoint_id, event_id, event_type, aggregate_id, sequence, payload)
    SELECT endpoint.id, %(event_id)s, %(event_type)s, %(aggregate_id)s, event.sequence, event.payload
    FROM event
    JOIN webhook_endpoints AS endpoint ON endpoint.principal = %(principal)s
    WHERE endpoint.deleted_at IS NULL AND %(event_type)s = ANY (endpoint.event_types)
    ON CONFLICT DO NOTHING
)
