//! Variables on shards without a server, with values and gradients of them.

#![allow(clippy::unwrap_used, reason = "tests declare valid variables")]

use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::GlobalStep;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
#[cfg(test)]
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use crate::gradients::params::{GradientMemory, Gradients, Params};
use crate::gradients::sharding_plan::ShardingPlan;

/// Gradients of vectors of these names, types and lengths, and of one more that is left out.
#[cfg(test)]
pub(crate) fn gradients_of(vectors: &[(&str, DType, u64)], left_out: &str) -> Gradients {
    let left_out = (left_out, DType::F32, 3);
    let all = vectors.iter().chain([&left_out]);
    let variables: Vec<VariableSpec> = all
        .map(|&(name, dtype, length)| {
            VariableSpec::new(name, dtype, Shape::new([length]).unwrap()).unwrap()
        })
        .collect();
    gradients_for(variables)
}

/// A plan of these variables on `tasks` tasks of one shard each.
pub(crate) fn plan_of(variables: Vec<VariableSpec>, tasks: u32) -> Arc<ShardingPlan> {
    let map = ShardMap::new((0..tasks).collect::<Vec<_>>(), 1).unwrap();
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
    Arc::new(ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap())))
}

/// Gradients of these variables on one shard.
pub fn gradients_for(variables: Vec<VariableSpec>) -> Gradients {
    let plan = plan_of(variables, 1);
    Gradients::new(plan.clone(), GradientMemory::new(&plan, Arc::default()))
}

/// Values of these variables, all zero, that were read at a global step.
pub fn params_for(variables: Vec<VariableSpec>, step: u64) -> Params {
    let mut params = Params::new(plan_of(variables, 1));
    params.step = GlobalStep(step);
    params
}
