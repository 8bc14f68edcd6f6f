//! [`ClusterSource`]: where a cluster can be found, and [`Resolver`]: which of them are tried.

use std::fmt;
use std::str::FromStr;

use super::ResolveError;
use crate::cluster::error::clip;

/// A source of the cluster and the task of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClusterSource {
    /// The values of the caller alone: `--ps-hosts` or `--cluster`.
    Flags,
    /// `TF_CONFIG`, as TensorFlow's programs read it: TFJob of Kubeflow, SageMaker, TonY, Spark.
    TfConfig,
    /// `CLUSTER_SPEC`, `JOB_NAME` and `TASK_INDEX` of TonY on YARN.
    Tony,
    /// `DMLC_ROLE` and the variables beside it, as ps-lite, MXNet and BytePS read them.
    Dmlc,
    /// A step of a Slurm job, started by `srun`.
    Slurm,
    /// A rank of MPI, Horovod or torchrun.
    Mpi,
    /// The names of pods in Kubernetes: Indexed Job, StatefulSet, JobSet.
    Kubernetes,
}

impl ClusterSource {
    /// All sources, in the order in which [`Resolver::Auto`] tries them.
    pub const ALL: [ClusterSource; 7] = [
        ClusterSource::Flags,
        ClusterSource::TfConfig,
        ClusterSource::Tony,
        ClusterSource::Dmlc,
        ClusterSource::Slurm,
        ClusterSource::Mpi,
        ClusterSource::Kubernetes,
    ];

    /// Returns the name by which `--resolve` takes the source.
    pub fn name(self) -> &'static str {
        match self {
            ClusterSource::Flags => "flags",
            ClusterSource::TfConfig => "tf-config",
            ClusterSource::Tony => "tony",
            ClusterSource::Dmlc => "dmlc",
            ClusterSource::Slurm => "slurm",
            ClusterSource::Mpi => "mpi",
            ClusterSource::Kubernetes => "kubernetes",
        }
    }
}

impl fmt::Display for ClusterSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The sources that are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolver {
    /// The first source that is set.
    Auto,
    /// One source.
    Only(ClusterSource),
}

impl FromStr for Resolver {
    type Err = ResolveError;

    /// Reads `auto` or the name of a source. An underscore is taken for a hyphen.
    fn from_str(text: &str) -> Result<Self, ResolveError> {
        let name = text.replace('_', "-");
        if name == "auto" {
            return Ok(Resolver::Auto);
        }
        let found = ClusterSource::ALL.into_iter().find(|source| source.name() == name);
        found.map(Resolver::Only).ok_or_else(|| ResolveError::UnknownResolver { name: clip(text) })
    }
}
