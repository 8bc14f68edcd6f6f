//! [`StepAgreement`]: what the ranks of a ring find out about each other before a step begins.

/// The step of a token of the servers. Steps of two restore epochs are never one step, even if they
/// have one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepKey {
    /// The restore epoch that the rank has joined.
    pub(super) epoch: u32,
    /// The state of the step owner in which that epoch began.
    pub(super) arena: u64,
    /// The global step.
    pub(super) step: u64,
}

/// The claim of a rank at the beginning of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepClaim {
    /// A token of this step.
    Granted(StepKey),
    /// No token: the servers have let it wait.
    Waiting,
    /// No wish for another step: the training ends for all ranks.
    Ending,
}

/// The result of the claims of all ranks. Every rank gets the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepAgreement {
    /// Each rank has a token of one and the same step.
    Step,
    /// Some ranks have a token, of this step at the latest, and others wait for one.
    Short {
        /// The latest step of a token.
        step: u64,
    },
    /// Every rank waits, or two have tokens of different steps.
    Apart,
    /// A rank ends the training.
    End,
}

/// A claim in numbers. The element-wise maximum over all ranks is their agreement.
pub(super) type ClaimWords = [i64; 8];

/// Below every number of a key, so that a rank without one does not change the maximum.
const NO_KEY: i64 = i64::MIN;

impl StepClaim {
    /// Encodes the claim. The complement of each number of the key follows it, because the maximum
    /// of the complements is the complement of the minimum: a key is common to all ranks if its
    /// maximum equals its minimum.
    pub(super) fn words(self) -> ClaimWords {
        let is = |claim| i64::from(self == claim);
        let key = match self {
            StepClaim::Granted(StepKey { epoch, arena, step }) => {
                let numbers = [i64::from(epoch), arena as i64, step as i64];
                numbers.map(|number| [number, !number])
            }
            StepClaim::Waiting | StepClaim::Ending => [[NO_KEY; 2]; 3],
        };
        let [epoch, arena, step] = key;
        [
            is(StepClaim::Waiting),
            is(StepClaim::Ending),
            epoch[0],
            epoch[1],
            arena[0],
            arena[1],
            step[0],
            step[1],
        ]
    }
}

impl StepAgreement {
    /// Decodes the maximum over the claims of all ranks.
    pub(super) fn of(maxima: ClaimWords) -> StepAgreement {
        let [waits, ends, epoch, epoch_low, arena, arena_low, step, step_low] = maxima;
        let is_common = epoch == !epoch_low && arena == !arena_low && step == !step_low;
        match (ends != 0, waits != 0) {
            (true, _) => StepAgreement::End,
            (false, true) if step != NO_KEY => StepAgreement::Short { step: step as u64 },
            (false, false) if is_common => StepAgreement::Step,
            (false, _) => StepAgreement::Apart,
        }
    }
}

/// Counts how often in a row a step was short of ranks.
///
/// A step that the servers have granted to some ranks alone can be complete without the others:
/// one has given its gradient already, in an earlier process, or joined after the step had begun.
/// The others cannot reduce with it, and the servers wait for them.
#[derive(Debug, Default)]
pub(super) struct ShortSteps {
    step: u64,
    in_a_row: u32,
}

/// The attempts short of a rank after which the ranks with a token give the step up. A token that is
/// merely late has come by then.
const SHORT_MAX: u32 = 3;

impl ShortSteps {
    /// Records an agreement.
    pub(super) fn record(&mut self, agreement: StepAgreement) {
        *self = match agreement {
            StepAgreement::Short { step } if step == self.step => {
                ShortSteps { step, in_a_row: self.in_a_row.saturating_add(1) }
            }
            StepAgreement::Short { step } => ShortSteps { step, in_a_row: 1 },
            StepAgreement::Step | StepAgreement::Apart | StepAgreement::End => {
                ShortSteps::default()
            }
        };
    }

    /// Whether a rank with a token of this step gives it up, without a gradient.
    pub(super) fn gives_up(&self, step: u64) -> bool {
        self.in_a_row >= SHORT_MAX && step == self.step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed(claims: &[StepClaim]) -> StepAgreement {
        let words = claims.iter().map(|claim| claim.words());
        let maxima = words.reduce(|a, b| std::array::from_fn(|word| a[word].max(b[word])));
        StepAgreement::of(maxima.unwrap())
    }

    fn granted(epoch: u32, arena: u64, step: u64) -> StepClaim {
        StepClaim::Granted(StepKey { epoch, arena, step })
    }

    #[test]
    fn a_step_begins_if_all_ranks_have_its_token() {
        use StepClaim::{Ending, Waiting};
        let own = granted(1, 7, 5);
        for (others, expected) in [
            (vec![], StepAgreement::Step),
            (vec![own, own], StepAgreement::Step),
            (vec![own, granted(1, 7, 6)], StepAgreement::Apart),
            (vec![granted(2, 7, 5)], StepAgreement::Apart),
            (vec![granted(1, 8, 5)], StepAgreement::Apart),
            (vec![own, Waiting], StepAgreement::Short { step: 5 }),
            (vec![granted(1, 7, 6), Waiting], StepAgreement::Short { step: 6 }),
            (vec![Waiting, Ending], StepAgreement::End),
        ] {
            let mut claims = vec![own];
            claims.extend(&others);
            assert_eq!(agreed(&claims), expected, "{others:?}");
            claims.reverse();
            assert_eq!(agreed(&claims), expected, "{others:?}, reversed");
        }
        assert_eq!(agreed(&[Waiting, Waiting]), StepAgreement::Apart);
    }

    /// A server may send any number.
    #[test]
    fn any_number_is_common_to_itself_alone() {
        for number in [0, 1, u64::MAX / 2, u64::MAX / 2 + 1, u64::MAX] {
            let own = granted(u32::MAX, number, number);
            assert_eq!(agreed(&[own, own]), StepAgreement::Step, "{number}");
            let other = granted(u32::MAX, number, number ^ 1);
            assert_eq!(agreed(&[own, other]), StepAgreement::Apart, "{number}");
        }
    }

    #[test]
    fn a_step_is_given_up_after_three_short_attempts_in_a_row() {
        let mut steps = ShortSteps::default();
        let short = StepAgreement::Short { step: 0 };
        for agreement in [short, short, StepAgreement::Step, short, short] {
            assert!(!steps.gives_up(0));
            steps.record(agreement);
        }
        assert!(!steps.gives_up(0));
        steps.record(short);
        assert!(steps.gives_up(0) && !steps.gives_up(1));
        steps.record(StepAgreement::Short { step: 1 });
        assert!(!steps.gives_up(0) && !steps.gives_up(1));
    }
}
