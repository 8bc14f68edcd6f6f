//! [`Launcher`]: the sources of a place.

use std::fmt;

/// The source of a process's place in its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// pushpull's own variables, such as `PUSHPULL_RANK`.
    Pushpull,
    /// `mpirun` of Open MPI 4 or 5.
    OpenMpi,
    /// `mpiexec` of MPICH, or another launcher that speaks PMI.
    Mpich,
    /// `horovodrun` without MPI.
    Horovod,
    /// `torchrun`, or another launcher that sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// `srun` of Slurm.
    Slurm,
    /// The program itself, by [`Launch::new`](super::Launch::new).
    Program,
}

impl Launcher {
    /// Returns the first part of the job keys.
    pub(super) fn key_prefix(self) -> &'static str {
        match self {
            Launcher::Pushpull => "pushpull",
            Launcher::OpenMpi => "open-mpi",
            Launcher::Mpich => "mpich",
            Launcher::Horovod => "horovod",
            Launcher::Torchrun => "torchrun",
            Launcher::Slurm => "slurm",
            Launcher::Program => "program",
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Pushpull => "pushpull",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Mpich => "MPICH",
            Launcher::Horovod => "Horovod",
            Launcher::Torchrun => "torchrun",
            Launcher::Slurm => "Slurm",
            Launcher::Program => "the program",
        })
    }
}
