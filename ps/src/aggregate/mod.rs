//! Gradient aggregation: how pushed gradients become steps.
//!
//! The step owner's token issuer counts steps and grants tokens; in synchronous mode a coordinator
//! decides which gradients make a step and each shard follows.

pub(crate) mod asynchronous_tokens;
pub(crate) mod bounded_staleness;
pub(crate) mod clipping;
pub(crate) mod current_step;
pub(crate) mod data_position;
pub(crate) mod push_audit;
pub(crate) mod recall;
pub(crate) mod step_coordinator;
pub(crate) mod step_follower;
pub(crate) mod step_replicas;
pub(crate) mod step_rule;
pub(crate) mod token_issuer;
pub(crate) mod token_ledger;

#[cfg(test)]
pub(crate) mod tests {
    mod admission_model;
    mod classic_traces;
    pub(crate) mod exhaustive;
}
