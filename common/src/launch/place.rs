//! [`Place`]: checked ranks and sizes.

use crate::protocol::limits;

use super::error::clip;
use super::{LaunchError, Lookup};

/// A number and the variable that has it.
pub(crate) type Named = (&'static str, u32);

/// Ranks below sizes that a ring can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) local_rank: Option<u32>,
    pub(super) local_size: Option<u32>,
}

impl Place {
    /// Creates a place without local numbers.
    pub(super) fn new(rank: Named, size: Named) -> Result<Place, LaunchError> {
        if size.1 == 0 || size.1 as usize > limits::RING_SIZE_MAX {
            return Err(LaunchError::Size { variable: size.0, size: size.1 });
        }
        check_below(rank, size)?;
        Ok(Place { rank: rank.1, size: size.1, local_rank: None, local_size: None })
    }

    /// Adds the local numbers. `size` is that of the job.
    pub(super) fn with_local(
        mut self,
        local_rank: Option<Named>,
        local_size: Option<Named>,
        size: &'static str,
    ) -> Result<Place, LaunchError> {
        if let Some(local_size) = local_size {
            if local_size.1 == 0 {
                return Err(LaunchError::Size { variable: local_size.0, size: local_size.1 });
            }
            if local_size.1 > self.size {
                return Err(LaunchError::LocalSize {
                    local_variable: local_size.0,
                    local_size: local_size.1,
                    size_variable: size,
                    size: self.size,
                });
            }
        }
        if let Some(local_rank) = local_rank {
            check_below(local_rank, local_size.unwrap_or((size, self.size)))?;
        }
        self.local_rank = local_rank.map(|(_, value)| value);
        self.local_size = local_size.map(|(_, value)| value);
        Ok(self)
    }
}

/// Reads the number of a variable, if it is set.
pub(crate) fn number(
    lookup: Lookup<'_>,
    variable: &'static str,
) -> Result<Option<Named>, LaunchError> {
    let Some(value) = lookup(variable) else {
        return Ok(None);
    };
    // `u32::from_str` takes a sign.
    let plain = value.bytes().all(|byte| byte.is_ascii_digit());
    match value.parse() {
        Ok(number) if plain => Ok(Some((variable, number))),
        _ => Err(LaunchError::NotNumber { variable, value: clip(&value) }),
    }
}

/// Checks that two numbers that mean the same are equal.
pub(super) fn check_equal(first: Named, second: Named) -> Result<(), LaunchError> {
    if first.1 == second.1 {
        return Ok(());
    }
    Err(LaunchError::Contradiction {
        first_variable: first.0,
        first: first.1,
        second_variable: second.0,
        second: second.1,
    })
}

fn check_below(rank: Named, size: Named) -> Result<(), LaunchError> {
    if rank.1 < size.1 {
        return Ok(());
    }
    Err(LaunchError::RankTooHigh {
        rank_variable: rank.0,
        rank: rank.1,
        size_variable: size.0,
        size: size.1,
    })
}
