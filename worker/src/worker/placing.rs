//! Where the variables of a model go, and among how many replicas they are averaged.

use pushpull_common::catalogue::Catalogue;
use pushpull_common::partition::Partitioner;
use pushpull_common::placement::{Placement, ShardMap};
use pushpull_common::variable::{Replication, VariableSpec};

use crate::config::WorkerConfig;
use crate::error::ConfigError;
use crate::session::ServerSettings;

/// Places the variables on shards. Servers whose optimizers need whole variables get them so, unless
/// a partitioner is given.
pub(super) fn place(
    config: &WorkerConfig,
    variables: &[VariableSpec],
    servers: &ServerSettings,
) -> Result<(Placement, Catalogue), ConfigError> {
    let map = ShardMap::of_cluster(&config.cluster, servers.shards_per_task)?;
    let mut variables = variables.to_vec();
    let automatic = variables.iter_mut().filter(|v| v.partitioner == Partitioner::Automatic);
    if servers.whole_variables {
        automatic.for_each(|variable| variable.partitioner = Partitioner::None);
    }
    let placement = Placement::plan(&variables, &map, &config.placement)?;
    let catalogue = Catalogue::new(variables, &placement)?;
    Ok((placement, catalogue))
}

/// Returns the number of replicas in the cluster, by which contributions to means are divided; 1 if
/// no variable is a mean.
pub(super) fn replicas(
    config: &WorkerConfig,
    variables: &[VariableSpec],
) -> Result<usize, ConfigError> {
    let is_mean = |it: &&VariableSpec| matches!(it.replication(), Replication::Mean { .. });
    let Some(variable) = variables.iter().find(is_mean) else { return Ok(1) };
    let counts = ["chief", "worker"].map(|job| config.cluster.num_tasks(job).unwrap_or(0));
    match counts.iter().sum() {
        0 => Err(ConfigError::NoReplicas { variable: variable.name().to_owned() }),
        replicas => Ok(replicas),
    }
}
