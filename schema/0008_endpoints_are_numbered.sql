-- Two endpoints that a principal creates at once cannot each count the other. But they cannot have one number: the
-- database refuses the second, which is then run again, and counts the first. Those from before have no number.
ALTER TABLE webhook_endpoints
    ADD COLUMN number integer; -- the lowest that none of its principal's others had when it was created

-- In place of the one by (principal, id), and of as much use to whoever looks endpoints up by their principal.
DROP INDEX webhook_endpoints_of_principal;
CREATE UNIQUE INDEX webhook_endpoints_of_principal ON webhook_endpoints (principal, number) WHERE deleted_at IS NULL;
