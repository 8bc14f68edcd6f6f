//! [`Row`]: the variables of a launcher, in the order in which they are read.

use super::place::{Place, check_equal, number};
use super::slurm::SlurmStep;
use super::{LaunchError, Launcher, Lookup};

/// The variables of one launcher.
pub(super) struct Row {
    pub(super) launcher: Launcher,
    pub(super) rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: Option<&'static str>,
    /// The variables whose values together are unique to a job.
    job: &'static [&'static str],
}

/// The launchers that Slurm may have started: all but itself.
pub(super) const ROWS: &[Row] = &[
    Row {
        launcher: Launcher::Pushpull,
        rank: "PUSHPULL_RANK",
        size: "PUSHPULL_SIZE",
        local_rank: "PUSHPULL_LOCAL_RANK",
        local_size: Some("PUSHPULL_LOCAL_SIZE"),
        job: &[],
    },
    Row {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job: &["PMIX_NAMESPACE"],
    },
    Row {
        launcher: Launcher::Mpich,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: MPICH_LOCAL_RANK,
        local_size: Some("MPI_LOCALNRANKS"),
        job: &[],
    },
    Row {
        launcher: Launcher::Horovod,
        rank: "HOROVOD_RANK",
        size: "HOROVOD_SIZE",
        local_rank: "HOROVOD_LOCAL_RANK",
        local_size: Some("HOROVOD_LOCAL_SIZE"),
        job: &["HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"],
    },
    Row {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: Some("LOCAL_WORLD_SIZE"),
        job: &["MASTER_ADDR", "MASTER_PORT"],
    },
];

impl Row {
    /// The variables of a task of a Slurm step. [`SlurmStep`] adds the local size and the job.
    pub(super) const SLURM: Row = Row {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_size: None,
        job: &[],
    };

    /// Reads the place, if the rank is set.
    pub(super) fn read(&self, lookup: Lookup<'_>) -> Result<Option<Place>, LaunchError> {
        let (rank, size) = match (number(lookup, self.rank)?, number(lookup, self.size)?) {
            (Some(rank), Some(size)) => (rank, size),
            (None, None) => return Ok(None),
            (Some((rank_variable, rank)), None) => {
                return Err(LaunchError::NoSize { rank_variable, rank, size_variable: self.size });
            }
            (None, Some((size_variable, size))) => {
                return Err(LaunchError::NoRank { size_variable, size, rank_variable: self.rank });
            }
        };
        let local_rank = number(lookup, self.local_rank)?;
        let local_size = match self.local_size {
            Some(variable) => number(lookup, variable)?,
            None => None,
        };
        Place::new(rank, size)?.with_local(local_rank, local_size, self.size).map(Some)
    }

    /// Returns the id of the job, if all its variables are set.
    pub(super) fn job_id(&self, lookup: Lookup<'_>) -> Option<String> {
        let values = self.job.iter().map(|name| lookup(name).filter(|value| !value.is_empty()));
        let values: Vec<String> = values.collect::<Option<_>>()?;
        (!values.is_empty()).then(|| values.join("-"))
    }
}

/// Finds the first row that is set, and checks that the others agree with it.
pub(super) fn find(
    lookup: Lookup<'_>,
    step: Option<&SlurmStep>,
) -> Result<Option<(&'static Row, Place)>, LaunchError> {
    let mut found: Option<(&Row, Place)> = None;
    for row in ROWS {
        let is_of_step = step.is_some() && lookup(MPICH_LOCAL_RANK).is_none();
        if row.launcher == Launcher::Mpich && is_of_step {
            continue;
        }
        let place = match row.read(lookup) {
            // Job scripts export WORLD_SIZE to programs that take their rank from elsewhere.
            Err(LaunchError::NoRank { .. })
                if row.launcher == Launcher::Torchrun && (found.is_some() || step.is_some()) =>
            {
                None
            }
            place => place?,
        };
        match (&found, place) {
            (_, None) => {}
            (None, Some(place)) => found = Some((row, place)),
            (Some((first, chosen)), Some(place)) => {
                check_equal((first.rank, chosen.rank), (row.rank, place.rank))?;
                check_equal((first.size, chosen.size), (row.size, place.size))?;
            }
        }
    }
    Ok(found)
}

/// The local rank that MPICH sets, and PMI of Slurm does not.
const MPICH_LOCAL_RANK: &str = "MPI_LOCALRANKID";
