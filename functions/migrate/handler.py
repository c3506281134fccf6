"""Brings the database's schema forward; invoked by a deployment or by an operator: wiring only."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import custom_resource, database, errors, migrations, roles, telemetry
from charging.settings import MigrateSettings

RESOURCE = "schema"


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Applies the migrations that are missing and returns their names. Raises, and so fails, when one cannot be.

    CloudFormation is answered instead, and goes on or rolls back.
    """
    return deploy(event) if custom_resource.is_request(event) else {"applied": migrate()}


def migrate() -> list[str]:
    """Signs in as the database's owner, applies what is missing, and gives the functions' roles what they need."""
    settings = MigrateSettings.from_environment()
    with database.connect(settings) as connection:
        applied = migrations.migrate(connection, schema())
        roles.provide(connection, password=settings.roles_password.get_secret_value() or None)
    telemetry.logger("migrate").info("migrated", applied=applied)
    return applied


def deploy(event: dict[str, Any]) -> dict[str, Any]:
    """Does what a stack asks for, and tells it the outcome: a release without its schema is not to serve.

    A database that is ahead is as it should be: the stack is going back to the release before, which works on the
    schema of the one after it. And no stack that is deleted takes the schema with it.
    """
    logger = telemetry.logger("migrate")
    failure = None
    if event["RequestType"] != "Delete":
        try:
            migrate()
        except errors.SchemaIsAhead as ahead:
            logger.warning("schema_is_ahead", reason=str(ahead))
        except (errors.ChargingError, psycopg.Error) as failed:
            logger.exception("migration_failed")
            # What a database says of itself may quote rows. The log group is for those who may see them.
            reason = str(failed) if isinstance(failed, errors.ChargingError) else f"SQLSTATE {failed.sqlstate}"
            failure = f"The schema could not be brought forward: {reason}. The log of the migrate function says more."
    custom_resource.answer(event, RESOURCE, failure=failure)
    return {}


def schema() -> Path:
    """The folder with the migrations: a layer brings it, and it is found as a package is."""
    found = find_spec("schema")
    if found is None or not found.submodule_search_locations:
        raise errors.Misconfigured("There is no folder `schema` beside the function's packages: its layer is missing.")
    return Path(next(iter(found.submodule_search_locations)))
