"""The modules of AWS's toolkit that other toolkits and published scripts import, made of `shoal_toolkit`.

`environment` describes the job, and `entry_point` runs the user's script. `runner`, `errors`, `mapping`, `params`,
`files` and `logging_config` have constants and helpers. Importing this package does nothing. Installing AWS's toolkit
replaces it and the command `train`.
"""

from sagemaker_training._absent import refuse_others

__getattr__ = refuse_others(
    __name__,
    ("entry_point", "environment", "errors", "files", "logging_config", "mapping", "params", "runner"),
    {
        "modules": "entry_point.run(uri, user_entry_point, args, env_vars), which also installs nothing twice",
        "mpi": "entry_point.run: `train` has started the ranks",
        "process": "entry_point.run, or subprocess",
        "smdataparallel": "entry_point.run: `train` has started the ranks",
        "torch_distributed": "entry_point.run: `train` has started the ranks",
        "trainer": "the command `train`",
        "intermediate_output": "the variable SM_OUTPUT_INTERMEDIATE_DIR: SageMaker uploads its files",
    },
    "SM_* variables, or sagemaker_training.environment.Environment()",
)
