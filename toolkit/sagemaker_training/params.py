"""The names of the contract's hyperparameters and variables, as constants."""

from __future__ import annotations

from sagemaker_training._absent import refuse_others

SAGEMAKER_PREFIX = "sagemaker_"
USER_PROGRAM_PARAM, USER_PROGRAM_ENV = "sagemaker_program", "SAGEMAKER_PROGRAM"
SUBMIT_DIR_PARAM, SUBMIT_DIR_ENV = "sagemaker_submit_directory", "SAGEMAKER_SUBMIT_DIRECTORY"
S3_OUTPUT_LOCATION_PARAM, S3_OUTPUT_LOCATION_ENV = "sagemaker_s3_output", "SAGEMAKER_S3_OUTPUT"
ENABLE_METRICS_PARAM = "sagemaker_enable_cloudwatch_metrics"
ENABLE_METRICS_ENV = "SAGEMAKER_ENABLE_CLOUDWATCH_METRICS"
LOG_LEVEL_PARAM, LOG_LEVEL_ENV = "sagemaker_container_log_level", "SAGEMAKER_CONTAINER_LOG_LEVEL"
JOB_NAME_PARAM, JOB_NAME_ENV = "sagemaker_job_name", "SAGEMAKER_JOB_NAME"
REGION_NAME_PARAM, REGION_NAME_ENV = "sagemaker_region", "SAGEMAKER_REGION"
DEFAULT_MODULE_NAME_PARAM = "default_user_module_name"
TUNING_METRIC_PARAM = "_tuning_objective_metric"
CURRENT_HOST_ENV = "CURRENT_HOST"
TRAINING_JOB_ENV = "TRAINING_JOB_NAME"
FRAMEWORK_TRAINING_MODULE_ENV = "SAGEMAKER_TRAINING_MODULE"
S3_ENDPOINT_URL = "S3_ENDPOINT_URL"
MPI_ENABLED = "sagemaker_mpi_enabled"
MPI_PROCESSES_PER_HOST = "sagemaker_mpi_num_of_processes_per_host"
MPI_NUM_PROCESSES = "sagemaker_mpi_num_processes"
MPI_CUSTOM_OPTIONS = "sagemaker_mpi_custom_mpi_options"
SMDATAPARALLEL_CUSTOM_MPI_OPTIONS = "sagemaker_distributed_dataparallel_custom_mpi_options"
PARAMETER_SERVER_ENABLED = "sagemaker_parameter_server_enabled"
MULTI_WORKER_MIRRORED_STRATEGY_ENABLED = "sagemaker_multi_worker_mirrored_strategy_enabled"
DISTRIBUTION_INSTANCE_GROUPS = "sagemaker_distribution_instance_groups"
PYTORCH_XLA_MULTI_WORKER_ENABLED = "sagemaker_pytorch_xla_multi_worker_enabled"
SM_HP_MP_PARAMETERS = "SM_HP_MP_PARAMETERS"
SAGEMAKER_NETWORK_INTERFACE_NAME = "sagemaker_network_interface_name"
SAGEMAKER_HYPERPARAMETERS = (
    USER_PROGRAM_PARAM,
    SUBMIT_DIR_PARAM,
    ENABLE_METRICS_PARAM,
    REGION_NAME_PARAM,
    LOG_LEVEL_PARAM,
    JOB_NAME_PARAM,
    DEFAULT_MODULE_NAME_PARAM,
    TUNING_METRIC_PARAM,
    S3_OUTPUT_LOCATION_PARAM,
)

__getattr__ = refuse_others(__name__, (), {}, "the name itself: docs/reference/hyperparameters.md lists them")
