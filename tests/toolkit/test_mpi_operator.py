"""The variables with which the MPI Operator changes mpirun in its launcher."""

from __future__ import annotations

from shoal_toolkit.discovery.host_list import remove_launch_variables

OPERATORS = {
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_set_default_slots": "1",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}


def test_its_options_for_ssh_do_not_reach_mpirun() -> None:
    environ = {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_btl": "tcp,self", **OPERATORS}
    remove_launch_variables(environ)
    assert environ == {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_btl": "tcp,self"}


def test_elsewhere_they_are_the_users() -> None:
    environ = dict(OPERATORS)
    remove_launch_variables(environ)
    assert environ == OPERATORS
