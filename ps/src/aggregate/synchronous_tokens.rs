//! How many tokens classic synchronous training has.

use thiserror::Error;

/// The numbers that say how many tokens there are: `replicas_to_aggregate` (A),
/// `total_num_replicas` (R) and the initial tokens, checked.
///
/// Every replica makes its first push without a token, every push takes a token, and an update
/// needs A fresh pushes. So the first update comes only if A pushes can be made before it:
/// `R + initial tokens >= A`. Source: `SyncReplicasOptimizer`, where the last is `num_tokens`.
///
/// The more initial tokens, the further replicas run ahead of each other: they carry the step that
/// training starts with, so what is computed under one after the first update is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SynchronousTokens {
    replicas_to_aggregate: u32,
    total_num_replicas: u32,
    initial_tokens: u32,
}

/// Why training cannot be set up with these numbers. The caller's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SynchronousTokensError {
    /// A number that must be at least 1 is 0.
    #[error("cannot train synchronously with {setting} = 0: at least 1 is needed")]
    Zero {
        /// Which number.
        setting: &'static str,
    },
    /// The first update could never be made.
    #[error(
        "cannot train synchronously with initial_tokens = {given}: {total_num_replicas} replicas \
         need {needed} to make the {replicas_to_aggregate} pushes of the first update"
    )]
    TooFewTokens {
        /// The initial tokens asked for.
        given: u32,
        /// The fewest that do: A - R.
        needed: u32,
        /// A.
        replicas_to_aggregate: u32,
        /// R.
        total_num_replicas: u32,
    },
}

impl SynchronousTokens {
    /// `replicas_to_aggregate` gradients an update, of `total_num_replicas` replicas. Replicas
    /// beyond that many gradients are backups; with fewer, each makes several pushes an update.
    ///
    /// Lock-step has no `initial_tokens`; TensorFlow's default is `replicas_to_aggregate` of them.
    ///
    /// # Errors
    ///
    /// [`SynchronousTokensError::Zero`] without replicas or gradients, [`SynchronousTokensError::TooFewTokens`]
    /// for fewer initial tokens than `replicas_to_aggregate - total_num_replicas`.
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

    /// The fresh gradients that an update is the mean of.
    pub const fn replicas_to_aggregate(&self) -> u32 {
        self.replicas_to_aggregate
    }

    /// The replicas that there are.
    pub const fn total_num_replicas(&self) -> u32 {
        self.total_num_replicas
    }

    /// The tokens that are in the queue when training starts; they carry the step it starts with.
    pub const fn initial_tokens(&self) -> u32 {
        self.initial_tokens
    }

    /// The tokens that an update puts in: as many as there are gradients in it or replicas,
    /// whichever are more, so that every replica goes on.
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
    fn numbers_that_cannot_start_are_refused() {
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
