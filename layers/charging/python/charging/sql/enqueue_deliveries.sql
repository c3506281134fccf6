-- Writes an event's deliveries, one for each endpoint of the principal that wants its type, and returns how many. Those
-- that were written before stay as they are. For transactions of more than one statement; a charge does the same within
-- its own.
--
-- Looks the endpoints up by webhook_endpoints_of_principal, and locks its own new rows until the transaction's end.
INSERT INTO outbox_deliveries (endpoint_id, event_id, event_type, aggregate_id, sequence, payload)
SELECT id, %(event_id)s, %(event_type)s, %(aggregate_id)s, %(sequence)s, %(payload)s
FROM webhook_endpoints
WHERE principal = %(principal)s AND deleted_at IS NULL AND %(event_type)s = ANY (event_types)
ON CONFLICT DO NOTHING
