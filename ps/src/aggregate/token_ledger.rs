//! The ledger of the step owner: the steps, and who holds each outstanding token, since when, and
//! under which generation.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::ids::{ClientEpoch, GlobalStep, TokenId};
use smallvec::SmallVec;

use super::clipping::BitwiseF64;
use super::data_position::{BatchTaker, DataBatch, DataPosition};
use crate::client_key::{ChangedClients, ClientKey};

/// The exclusive upper bound of token numbers: durable words pack a token beside other bits.
pub(crate) const TOKEN_LIMIT: u64 = 1 << 56;

/// Returns the generation of a token: a hash of the token and of the epoch of the client that it is
/// granted to.
///
/// Every shard can compute it. A shard that grants no tokens therefore rejects a gradient whose
/// client invented its token or has it from another client. The generation is not secret.
pub(crate) fn generation_of(token: TokenId, holder: ClientEpoch) -> u32 {
    // The finalizer of SplitMix64 (Steele, Lea and Flood, 2014) mixes both into all bits.
    let mut mixed = token.0 ^ holder.0.rotate_left(32);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // Generation 0 means that there is no token.
    ((mixed >> 32) as u32).max(1)
}

/// An outstanding token, as its holder receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Issued {
    pub(crate) token: TokenId,
    pub(crate) generation: u32,
    pub(crate) step: GlobalStep,
    /// The batch of the declared data set.
    pub(crate) batch: Option<DataBatch>,
}

/// The shards that hold the whole push of a token: for each, the sum of the squares of its elements
/// there.
pub(crate) type HeldOn = SmallVec<[Option<BitwiseF64>; 4]>;

/// An outstanding token and its holder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OutstandingToken {
    pub(crate) holder: ClientKey,
    pub(crate) issued: Issued,
    pub(crate) since: Instant,
    /// In synchronous mode, an item for each shard. Not durable: shards report it again.
    pub(crate) held: HeldOn,
}

/// The tokens of one holder; usually only the one it trains under.
type HolderTokens = SmallVec<[u64; 4]>;

/// The durable state of a token issuer, except for its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct StepState {
    pub(crate) step: u64,
    pub(crate) next_token: u64,
    pub(crate) finished: bool,
    /// The gradients since the last restore that are applied on some shards only, for good.
    pub(crate) partly_applied: u64,
}

/// The steps, the outstanding tokens in ascending order and by holder, and the data position.
///
/// Invariants: every token has one holder. With a declared data set every token has a batch, which
/// no other token has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TokenLedger {
    pub(crate) steps: StepState,
    tokens: BTreeMap<u64, OutstandingToken>,
    by_holder: BTreeMap<ClientKey, HolderTokens>,
    /// The holders whose tokens or progress have changed since the last commit.
    pub(crate) changed: ChangedClients,
    /// The position in the declared data set.
    pub(crate) data: Option<DataPosition>,
    /// Whether another data set or none is declared since the last commit.
    pub(crate) data_replaced: bool,
}

impl TokenLedger {
    /// Creates a ledger at step 0.
    pub(crate) fn new() -> TokenLedger {
        TokenLedger {
            steps: StepState { next_token: 1, ..StepState::default() },
            tokens: BTreeMap::new(),
            by_holder: BTreeMap::new(),
            changed: ChangedClients::default(),
            data: None,
            data_replaced: false,
        }
    }

    /// Returns whether a token can be granted as far as the data are concerned.
    pub(crate) fn has_batch_for(&self, taker: BatchTaker) -> bool {
        self.data.as_ref().is_none_or(|data| data.has_batch_for(taker))
    }

    /// Returns whether no token can be granted to anybody, because all batches are spent or held.
    pub(crate) fn data_is_exhausted(&self) -> bool {
        self.data.as_ref().is_some_and(DataPosition::is_exhausted)
    }

    /// Returns whether all batches are spent, if no admitted push holds one.
    pub(crate) fn data_has_ended(&self) -> bool {
        self.tokens.is_empty() && self.data_is_exhausted()
    }

    /// Grants the next token, with a batch, to the incarnation of a client that has this epoch.
    /// Returns `None` if there is no batch for it.
    pub(crate) fn grant(
        &mut self,
        holder: ClientKey,
        epoch: ClientEpoch,
        taker: BatchTaker,
        now: Instant,
        held: HeldOn,
    ) -> Option<Issued> {
        let batch = match &mut self.data {
            Some(data) => Some(data.take(taker)?),
            None => None,
        };
        let token = TokenId(self.steps.next_token);
        self.steps.next_token += 1;
        let generation = generation_of(token, epoch);
        let step = GlobalStep(self.steps.step);
        let issued = Issued { token, generation, step, batch };
        self.insert(holder, issued, now, held);
        Some(issued)
    }

    /// Restores a token of an earlier process. Returns false if its batch cannot have been granted
    /// with it.
    pub(crate) fn restore(
        &mut self,
        holder: ClientKey,
        issued: Issued,
        since: Instant,
        held: HeldOn,
    ) -> bool {
        let known = match (&mut self.data, issued.batch) {
            (None, None) => true,
            (Some(data), Some(batch)) if batch < data.next() => {
                data.restore_held(batch);
                true
            }
            _ => false,
        };
        if known {
            self.insert(holder, issued, since, held);
        }
        known
    }

    fn insert(&mut self, holder: ClientKey, issued: Issued, since: Instant, held: HeldOn) {
        let token = issued.token.0;
        self.tokens.insert(token, OutstandingToken { holder, issued, since, held });
        self.by_holder.entry(holder).or_default().push(token);
        self.changed.insert(holder);
    }

    /// Removes a token whose gradient counts. Spends its batch.
    pub(crate) fn spend(&mut self, token: u64) -> Option<OutstandingToken> {
        let removed = self.remove(token)?;
        self.spend_batch(removed.issued.batch);
        Some(removed)
    }

    /// Removes a token whose gradient will count. The admitted push holds its batch.
    pub(crate) fn admit(&mut self, token: u64) -> Option<OutstandingToken> {
        self.remove(token)
    }

    /// Removes a token whose gradient does not count. Its batch will be granted again.
    pub(crate) fn take_back(&mut self, token: u64) -> Option<OutstandingToken> {
        let removed = self.remove(token)?;
        self.put_back(removed.issued.batch);
        Some(removed)
    }

    /// Gives back the batch of a gradient that does not count.
    pub(crate) fn put_back(&mut self, batch: Option<DataBatch>) {
        if let (Some(batch), Some(data)) = (batch, &mut self.data) {
            data.put_back(batch);
        }
    }

    /// Spends the batch of a gradient that counts.
    pub(crate) fn spend_batch(&mut self, batch: Option<DataBatch>) {
        if let (Some(_), Some(data)) = (batch, &mut self.data) {
            data.spend();
        }
    }

    fn remove(&mut self, token: u64) -> Option<OutstandingToken> {
        let removed = self.tokens.remove(&token)?;
        if let Some(tokens) = self.by_holder.get_mut(&removed.holder) {
            tokens.retain(|other| *other != token);
            if tokens.is_empty() {
                self.by_holder.remove(&removed.holder);
            }
        }
        self.changed.insert(removed.holder);
        Some(removed)
    }

    /// Takes every token back.
    pub(crate) fn clear(&mut self) {
        self.changed.extend(std::mem::take(&mut self.by_holder).into_keys());
        for out in std::mem::take(&mut self.tokens).into_values() {
            self.put_back(out.issued.batch);
        }
    }

    pub(crate) fn get(&self, token: u64) -> Option<&OutstandingToken> {
        self.tokens.get(&token)
    }

    pub(crate) fn get_mut(&mut self, token: u64) -> Option<&mut OutstandingToken> {
        self.tokens.get_mut(&token)
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Yields the tokens in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &OutstandingToken> {
        self.tokens.values()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut OutstandingToken> {
        self.tokens.values_mut()
    }

    /// Yields the tokens that a client holds, in ascending order.
    pub(crate) fn of(&self, holder: ClientKey) -> impl Iterator<Item = Issued> {
        self.held_by(holder).map(|out| out.issued)
    }

    /// Yields the outstanding tokens of a client, in ascending order.
    pub(crate) fn held_by(&self, holder: ClientKey) -> impl Iterator<Item = &OutstandingToken> {
        let tokens = self.by_holder.get(&holder).into_iter().flatten();
        tokens.filter_map(|token| self.tokens.get(token))
    }

    /// Returns the number of tokens that a client holds.
    pub(crate) fn count_of(&self, holder: ClientKey) -> usize {
        self.by_holder.get(&holder).map_or(0, |tokens| tokens.len())
    }

    /// Yields each client that holds a token, once.
    pub(crate) fn holders(&self) -> impl Iterator<Item = ClientKey> {
        self.by_holder.keys().copied()
    }

    /// Returns the holder of a token.
    pub(crate) fn holder_of(&self, token: TokenId) -> Option<ClientKey> {
        self.get(token.0).map(|out| out.holder)
    }

    /// Returns whether the client holds this token with this generation.
    pub(crate) fn holds(&self, holder: ClientKey, token: TokenId, generation: u32) -> bool {
        let out = self.get(token.0);
        out.is_some_and(|out| out.holder == holder && out.issued.generation == generation)
    }

    /// Returns the numbers of the tokens that satisfy `which`.
    pub(crate) fn numbers(&self, which: impl Fn(&OutstandingToken) -> bool) -> Vec<u64> {
        self.iter().filter(|out| which(out)).map(|out| out.issued.token.0).collect()
    }

    /// Extends all time limits by a pause of this server, during which no token could be spent.
    pub(crate) fn extend_deadlines(&mut self, pause: Duration, now: Instant) {
        self.iter_mut().for_each(|out| out.since = (out.since + pause).min(now));
    }

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self) {
        let held: usize = self.by_holder.values().map(|tokens| tokens.len()).sum();
        assert_eq!(held, self.tokens.len(), "every token has one holder");
        let listed = |out: &OutstandingToken| self.of(out.holder).any(|other| other == out.issued);
        assert!(self.iter().all(listed), "every token is listed under its holder");
        let with_data = self.iter().all(|out| out.issued.batch.is_some() == self.data.is_some());
        assert!(with_data, "every token has a batch if there are data");
    }
}

impl OutstandingToken {
    /// Returns whether the token has been held for this long.
    pub(crate) fn is_expired(&self, now: Instant, timeout: Option<Duration>) -> bool {
        let held = now.saturating_duration_since(self.since);
        timeout.is_some_and(|timeout| held >= timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_found_by_number_and_by_holder_until_it_is_removed() {
        let a = ClientKey(0);
        let b = ClientKey(1);
        let now = Instant::now();
        let mut tokens = TokenLedger::new();
        let [first, second, third] = [a, b, a].map(|holder| {
            let taker = BatchTaker::Client(holder);
            let issued = tokens.grant(holder, ClientEpoch(3), taker, now, HeldOn::new());
            tokens.check_invariants();
            issued.unwrap()
        });
        assert_eq!(tokens.of(a).collect::<Vec<_>>(), [first, third]);
        assert!(tokens.holds(b, second.token, second.generation));
        assert!(!tokens.holds(a, second.token, second.generation));
        assert!(!tokens.holds(b, second.token, second.generation + 1));
        let mut changed = Vec::new();
        tokens.changed.append_to(&mut changed);
        assert_eq!(changed, [a, b]);
        assert_eq!(tokens.take_back(second.token.0).map(|out| out.holder), Some(b));
        assert_eq!(tokens.take_back(second.token.0), None);
        tokens.check_invariants();
        assert_eq!((tokens.len(), tokens.count_of(b)), (2, 0));
        assert_eq!(tokens.holders().collect::<Vec<_>>(), [a]);
        tokens.changed.append_to(&mut changed);
        assert_eq!(changed, [a, b, b], "a removal is saved too");
    }
}
