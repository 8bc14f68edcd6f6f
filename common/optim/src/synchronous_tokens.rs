//! The number of tokens in classic synchronous training.

use thiserror::Error;

/// The validated counts that define the number of tokens: `replicas_to_aggregate` (A),
/// `total_num_replicas` (R) and the initial tokens.
///
/// Every replica makes its first push without a token, takes a token after each push, and an update
/// needs A fresh pushes. So the first update happens only if A pushes can be made before it: `R +
/// initial tokens >= A`. Source: `SyncReplicasOptimizer`, which calls the initial tokens
/// `num_tokens`.
///
/// More initial tokens let replicas run further ahead of each other. These tokens carry the step
/// that training starts with, so a gradient computed under one after the first update is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SynchronousTokens {
    replicas_to_aggregate: u32,
    total_num_replicas: u32,
    initial_tokens: u32,
}

/// The reason why training cannot be set up with these counts. The caller's configuration is at
/// fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SynchronousTokensError {
    /// A count that must be at least 1 is 0.
    #[error("cannot train synchronously with {setting} = 0: at least 1 is needed")]
    Zero {
        /// The name of the count.
        setting: &'static str,
    },
    /// The first update could never be made.
    #[error(
        "cannot train synchronously with initial_tokens = {given}: {total_num_replicas} replicas \
         need {needed} to make the {replicas_to_aggregate} pushes of the first update"
    )]
    TooFewTokens {
        /// The number of initial tokens given.
        given: u32,
        /// The minimum number of initial tokens: A - R.
        needed: u32,
        /// `replicas_to_aggregate`.
        replicas_to_aggregate: u32,
        /// `total_num_replicas`.
        total_num_replicas: u32,
    },
}

impl SynchronousTokens {
    /// Validates the counts: each update takes `replicas_to_aggregate` gradients from
    /// `total_num_replicas` replicas. If there are more replicas than gradients, the surplus are
    /// backups. If there are fewer, each replica makes several pushes per update.
    ///
    /// Lock-step training has no `initial_tokens`; TensorFlow's default is `replicas_to_aggregate`.
    ///
    /// # Errors
    ///
    /// [`SynchronousTokensError::Zero`] without replicas or gradients,
    /// [`SynchronousTokensError::TooFewTokens`] for fewer initial tokens than
    /// `replicas_to_aggregate - total_num_replicas`.
    pub const fn new(
        replicas_to_aggregate: u32,
        total_num_replicas: u32,
        initial_tokens: u32,
    ) -> Result<SynchronousTokens, SynchronousTokensError> {
        if replicas_to_aggregate == 0 {
            return Err(SynchronousTokensError::Zero { setting: "replicas_to_aggregate" });
        }
        if total_num_replicas == 0 {
            return Err(SynchronousTokensError::Zero { setting: "total_num_replicas" });
        }
        let needed = replicas_to_aggregate.saturating_sub(total_num_replicas);
        if initial_tokens < needed {
            return Err(SynchronousTokensError::TooFewTokens {
                given: initial_tokens,
                needed,
                replicas_to_aggregate,
                total_num_replicas,
            });
        }
        Ok(SynchronousTokens { replicas_to_aggregate, total_num_replicas, initial_tokens })
    }

    /// Returns the number of fresh gradients that an update averages.
    pub const fn replicas_to_aggregate(&self) -> u32 {
        self.replicas_to_aggregate
    }

    /// Returns the number of replicas.
    pub const fn total_num_replicas(&self) -> u32 {
        self.total_num_replicas
    }

    /// Returns the number of tokens in the queue when training starts. They carry the step that
    /// training starts with.
    pub const fn initial_tokens(&self) -> u32 {
        self.initial_tokens
    }

    /// Returns the number of tokens that an update adds: the larger of the number of its gradients
    /// and the number of replicas, so that every replica continues.
    pub const fn tokens_per_update(&self) -> u32 {
        if self.replicas_to_aggregate > self.total_num_replicas {
            self.replicas_to_aggregate
        } else {
            self.total_num_replicas
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_without_replicas_or_gradients_are_rejected() {
        let tokens = SynchronousTokens::new(2, 3, 0).unwrap();
        assert_eq!((tokens.tokens_per_update(), tokens.initial_tokens()), (3, 0));
        let tokens = SynchronousTokens::new(4, 2, 2).unwrap();
        assert_eq!((tokens.tokens_per_update(), tokens.initial_tokens()), (4, 2));
        assert_eq!((tokens.replicas_to_aggregate(), tokens.total_num_replicas()), (4, 2));
        let zero = |setting| Err(SynchronousTokensError::Zero { setting });
        assert_eq!(SynchronousTokens::new(0, 1, 0), zero("replicas_to_aggregate"));
        assert_eq!(SynchronousTokens::new(1, 0, 1), zero("total_num_replicas"));
    }
}
