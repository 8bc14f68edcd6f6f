//! A model of a shard for random tests: push slots, parts, settled pushes and tokens. It behaves as
//! the protocol demands of a server with one client, and asserts what the protocol demands of the
//! client.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use pushpull_common::ids::{GlobalStep, RequestId, RestoreEpoch, TokenId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::message::{self, ModeIs, PushPart, PushShared, Welcome};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Grant, Message, Outcome, PushState, Refusal};

use super::world::{SentFrame, push_answer, welcome};

/// An answer of a shard, with its body.
pub(super) type ModelAnswer = (RequestId, GlobalStep, Message, Vec<u8>);

/// The value of every byte of some memory, which a client may share.
pub(super) type FillByte = Arc<AtomicU8>;

fn now(fill: &FillByte) -> u8 {
    fill.load(Ordering::Relaxed)
}

#[derive(Debug)]
struct ModelArrival {
    push_slot: u32,
    /// The value of every byte of the push.
    fill: Option<FillByte>,
    bytes: u64,
    token: TokenId,
    /// The request to answer once the push is applied, and whether a token is wanted with the
    /// answer.
    whole: Option<(RequestId, bool)>,
}

pub(super) struct ShardModel {
    pub(super) owner: bool,
    pub(super) bytes: u64,
    pub(super) answers: VecDeque<ModelAnswer>,
    push_slots_max: usize,
    /// The push slots that the client holds, in use or not.
    push_slots: BTreeSet<u32>,
    next_push_slot: u32,
    waits_for_push_slot: VecDeque<(RequestId, u64)>,
    waits_for_token: VecDeque<RequestId>,
    arrivals: BTreeMap<u64, ModelArrival>,
    skipped: Option<(u64, u32)>,
    pub(super) settled: BTreeMap<u64, Outcome>,
    /// How often each push was applied, by the value of its bytes.
    pub(super) applied: BTreeMap<u8, usize>,
    /// The granted tokens.
    pub(super) out: BTreeSet<u64>,
    next_token: u64,
    step: u64,
    version: u64,
    pub(super) epoch: RestoreEpoch,
    /// Whether steps are synchronous: nothing is applied before the owner decides.
    pub(super) synchronous: bool,
    /// Whether the owner rejects some gradients as stale. No other shard may hold those whole.
    pub(super) owner_first: bool,
    /// The bytes of synchronous pushes that another shard than the owner holds.
    held: BTreeMap<u64, Option<FillByte>>,
    /// The gradient of the last step, applied when the next one begins.
    accepted: Option<FillByte>,
    /// The slots of the push buffer shared over this connection.
    pub(super) shared: BTreeMap<u32, FillByte>,
    next_shared: u32,
    /// Tokens whose step has passed.
    expired_tokens: BTreeSet<u64>,
}

/// The step of the restored checkpoint.
pub(super) const RESTORED_STEP: GlobalStep = GlobalStep(2);

impl ShardModel {
    pub(super) fn new(owner: bool, bytes: u64, push_slots_max: usize) -> ShardModel {
        ShardModel {
            owner,
            bytes,
            answers: VecDeque::new(),
            push_slots_max,
            push_slots: BTreeSet::new(),
            next_push_slot: 1,
            waits_for_push_slot: VecDeque::new(),
            waits_for_token: VecDeque::new(),
            arrivals: BTreeMap::new(),
            skipped: None,
            settled: BTreeMap::new(),
            applied: BTreeMap::new(),
            out: BTreeSet::new(),
            next_token: 1,
            step: 0,
            version: 0,
            epoch: RestoreEpoch(1),
            synchronous: false,
            owner_first: false,
            held: BTreeMap::new(),
            accepted: None,
            shared: BTreeMap::new(),
            next_shared: 1_000,
            expired_tokens: BTreeSet::new(),
        }
    }

    /// The owner accepts a push that all shards hold, if there is one. It counts on all of them.
    pub(super) fn accept_one(shards: &mut [ShardModel]) {
        let Some((owner, others)) = shards.split_first_mut() else { return };
        let everywhere =
            |sequence: &u64| others.iter().all(|other| other.held.contains_key(sequence));
        let whole = owner.arrivals.iter().filter(|(_, arrival)| arrival.whole.is_some());
        let Some(sequence) = whole.map(|(&sequence, _)| sequence).find(everywhere) else { return };
        ShardModel::apply_accepted(owner);
        others.iter_mut().for_each(ShardModel::apply_accepted);
        let of_owner = owner.arrivals[&sequence].fill.clone();
        let held: Vec<Option<FillByte>> =
            others.iter_mut().map(|other| other.held.remove(&sequence).flatten()).collect();
        let some = held.iter().flatten().last().or(of_owner.as_ref());
        let some = some.expect("some shard has bytes").clone();
        let step = GlobalStep(owner.step);
        let all = std::iter::once((&mut *owner, of_owner)).chain(others.iter_mut().zip(held));
        for (shard, fill) in all {
            shard.accepted = Some(fill.unwrap_or_else(|| some.clone()));
            shard.step = step.0 + 1;
            shard.version = step.0 + 1;
        }
        owner.decide(sequence, Outcome::Accepted { step });
    }

    /// Applies the last step, with the gradient bytes as they are now.
    pub(super) fn apply_accepted(&mut self) {
        if let Some(fill) = self.accepted.take() {
            *self.applied.entry(now(&fill)).or_default() += 1;
        }
    }

    /// The owner rejects the oldest push it has received parts of as stale.
    pub(super) fn reject_one_as_stale(shards: &mut [ShardModel]) {
        let Some((owner, others)) = shards.split_first_mut() else { return };
        let Some((&sequence, arrival)) = owner.arrivals.first_key_value() else { return };
        let token = arrival.token.0;
        for other in others {
            other.held.remove(&sequence);
            other.expired_tokens.insert(token);
        }
        owner.decide(sequence, Outcome::Stale { current: GlobalStep(owner.step) });
    }

    /// The owner decides a push.
    fn decide(&mut self, sequence: u64, outcome: Outcome) {
        let Some(arrival) = self.arrivals.remove(&sequence) else { return };
        self.push_slots.remove(&arrival.push_slot);
        assert!(self.out.remove(&arrival.token.0), "token {} is spent twice", arrival.token);
        self.settle(sequence, outcome);
        if let Some((request, _)) = arrival.whole.filter(|whole| whole.0.0 != 0) {
            self.answer(request, push_answer(outcome));
        }
        self.give_push_slots();
    }

    /// The owner answers waiting pushes that it has not decided in time.
    pub(super) fn expire_waiting_pushes(&mut self) {
        let whole = self.arrivals.values_mut().filter_map(|arrival| arrival.whole.as_mut());
        let requests: Vec<RequestId> = whole
            .map(|whole| std::mem::take(&mut whole.0))
            .filter(|request| request.0 != 0)
            .collect();
        for request in requests {
            let awaited = Detail::clipped("straggler");
            self.refuse(request, Refusal::Deadline { waited_ms: 1, awaited });
        }
    }

    fn settle(&mut self, sequence: u64, outcome: Outcome) {
        let before = self.settled.insert(sequence, outcome);
        assert!(before.is_none(), "push {sequence} is settled twice");
    }

    /// A shard other than the owner holds its whole share of a synchronous push.
    fn hold(&mut self, request: RequestId, sequence: u64) {
        let Some(arrival) = self.arrivals.remove(&sequence) else { return };
        self.push_slots.remove(&arrival.push_slot);
        let current = GlobalStep(self.step);
        let outcome = match self.expired_tokens.contains(&arrival.token.0) {
            true => Outcome::Stale { current },
            false => Outcome::Held {},
        };
        if outcome == (Outcome::Held {}) {
            self.held.insert(sequence, arrival.fill.clone());
        }
        self.settle(sequence, outcome);
        self.answer(request, push_answer(outcome));
        self.give_push_slots();
    }

    /// The connection is lost, with its incomplete pushes and its pending requests.
    pub(super) fn disconnected(&mut self) {
        self.answers.clear();
        self.waits_for_push_slot.clear();
        self.waits_for_token.clear();
        self.skipped = None;
        self.shared.clear();
        self.arrivals.retain(|_, arrival| arrival.whole.is_some());
        for arrival in self.arrivals.values_mut() {
            // The request number means nothing on the next connection.
            arrival.whole = Some((RequestId(0), false));
        }
    }

    /// Another client takes the unused push slots.
    pub(super) fn steal_push_slots(&mut self) {
        let used: BTreeSet<u32> = self.arrivals.values().map(|arrival| arrival.push_slot).collect();
        self.push_slots.retain(|push_slot| used.contains(push_slot));
    }

    /// The server is killed and restarted from its state. Whole pushes, settled pushes and tokens
    /// survive. Unused push slots are lost, and their numbers are assigned again.
    pub(super) fn restart(&mut self) {
        self.disconnected();
        self.steal_push_slots();
        self.next_push_slot = 1;
    }

    /// A checkpoint is restored, which discards all other state.
    pub(super) fn begin_epoch(&mut self) {
        let step = RESTORED_STEP.0;
        let epoch = RestoreEpoch(self.epoch.0 + 1);
        *self = ShardModel {
            step,
            epoch,
            ..ShardModel::new(self.owner, self.bytes, self.push_slots_max)
        };
    }

    /// Applies one whole push.
    pub(super) fn work(&mut self) {
        let whole = self.arrivals.iter().find(|(_, arrival)| arrival.whole.is_some());
        let Some((&sequence, arrival)) = whole else { return };
        if self.owner && self.owner_first && arrival.token.0 != 0 && sequence.is_multiple_of(3) {
            return self.decide(sequence, Outcome::Stale { current: GlobalStep(self.step) });
        }
        let arrival = self.arrivals.remove(&sequence).unwrap();
        self.push_slots.remove(&arrival.push_slot);
        self.version += 1;
        *self.applied.entry(arrival.fill.as_ref().map_or(0, now)).or_default() += 1;
        if self.owner && arrival.token.0 != 0 {
            self.step += 1;
            assert!(self.out.remove(&arrival.token.0), "token {} is spent twice", arrival.token);
        }
        let version = self.version;
        let step = GlobalStep(self.step);
        let outcome = Outcome::Applied { version, step, staleness: 0 };
        self.settle(sequence, outcome);
        self.give_push_slots();
        let Some((request, next)) = arrival.whole.filter(|whole| whole.0.0 != 0) else { return };
        let next = (next && self.owner).then(|| self.grant());
        let push_slot = if self.version.is_multiple_of(3) { self.free_push_slot() } else { 0 };
        self.answer(request, message::PushAnswer { next, push_slot, ..push_answer(outcome) });
    }

    /// Grants a token to the oldest waiting request.
    pub(super) fn grant_waiting(&mut self) {
        if let Some(request) = self.waits_for_token.pop_front() {
            let grant = self.grant();
            self.answer(request, message::Granted { grant });
        }
    }

    fn grant(&mut self) -> Grant {
        let token = self.next_token;
        self.next_token += 1;
        self.out.insert(token);
        Grant {
            token: TokenId(token),
            generation: 1,
            step: GlobalStep(self.step),
            push_slot: 0,
            samples: None,
            ahead: None,
        }
    }

    fn unused_push_slot(&self) -> Option<u32> {
        let used = |push_slot: &&u32| {
            self.arrivals.values().any(|arrival| arrival.push_slot == **push_slot)
        };
        self.push_slots.iter().find(|push_slot| !used(push_slot)).copied()
    }

    fn free_push_slot(&mut self) -> u32 {
        if !self.waits_for_push_slot.is_empty() {
            return 0;
        }
        self.push_slot().unwrap_or(0)
    }

    fn push_slot(&mut self) -> Option<u32> {
        let unused = self.unused_push_slot();
        if unused.is_some() || self.push_slots.len() == self.push_slots_max {
            return unused;
        }
        while !self.push_slots.insert(self.next_push_slot) {
            self.next_push_slot += 1;
        }
        self.next_push_slot += 1;
        Some(self.next_push_slot - 1)
    }

    fn give_push_slots(&mut self) {
        while !self.waits_for_push_slot.is_empty()
            && let Some(push_slot) = self.push_slot()
            && let Some((request, _)) = self.waits_for_push_slot.pop_front()
        {
            self.answer(request, message::Reserved { push_slot });
        }
    }

    fn answer(&mut self, request: RequestId, message: impl Into<Message>) {
        self.answers.push_back((request, GlobalStep(self.step), message.into(), Vec::new()));
    }

    fn refuse(&mut self, request: RequestId, refusal: Refusal) {
        self.answer(request, message::Refused { refusal });
    }

    /// Handles a frame of the client.
    pub(super) fn handle(&mut self, frame: &SentFrame) {
        let request = frame.request();
        let sequence = frame.envelope.sequence.0;
        let found = match &frame.message {
            Message::Hello(hello) => hello.seen_epoch,
            _ => frame.envelope.restore_epoch,
        };
        if found.0 != 0 && found != self.epoch {
            let current = self.epoch;
            let step = RESTORED_STEP;
            return self.refuse(request, Refusal::RestoreEpoch { found, current, step });
        }
        match &frame.message {
            Message::Hello(_) => {
                let restore_epoch = self.epoch;
                let restored_step = RESTORED_STEP;
                let mode = match self.synchronous {
                    false => ModeIs::Asynchronous { owner_first: self.owner_first },
                    true => ModeIs::Synchronous { replicas_to_aggregate: 1, total_num_replicas: 2 },
                };
                self.answer(request, Welcome { mode, restore_epoch, restored_step, ..welcome() });
            }
            _ if found.0 == 0 => panic!("{:?} without an epoch", frame.message),
            Message::Heartbeat(_) => self.answer(request, message::HeartbeatAnswer {}),
            Message::Reserve(_) => {
                self.waits_for_push_slot.push_back((request, sequence));
                self.give_push_slots();
            }
            Message::PushPart(part) => {
                let same = frame.body.windows(2).all(|pair| pair[0] == pair[1]);
                assert!(same, "two pushes are mixed");
                let fill = frame.body.first().map(|&byte| Arc::new(AtomicU8::new(byte)));
                self.part(frame, part, fill, frame.body.len() as u64);
            }
            Message::PushShared(shared) => self.shared_part(frame, shared),
            Message::ShareValues(_) => {
                let detail = Detail::clipped("no");
                self.refuse(request, Refusal::Unsupported { kind: 6, detail });
            }
            Message::SharePushBuffer(_) => self.share(request),
            Message::Withdraw(_) => self.withdraw(request, sequence),
            Message::OutcomeQuery(_) => {
                let state = match (self.settled.get(&sequence), self.arrivals.get(&sequence)) {
                    (Some(&outcome), _) => PushState::Settled { outcome },
                    (None, Some(arrival)) => PushState::Receiving { bytes: arrival.bytes },
                    (None, None) => PushState::Unknown {},
                };
                self.answer(request, message::OutcomeIs { state });
            }
            Message::TokenRequest(asks) => {
                assert!(self.owner && self.waits_for_token.is_empty(), "one request at a time");
                let lost = self.out.range(asks.newest.0 + 1..).next().copied();
                match lost {
                    Some(token) => {
                        let token = TokenId(token);
                        let step = GlobalStep(self.step);
                        let grant = Grant {
                            token,
                            generation: 1,
                            step,
                            push_slot: 0,
                            samples: None,
                            ahead: None,
                        };
                        self.answer(request, message::Granted { grant });
                    }
                    None => self.waits_for_token.push_back(request),
                }
            }
            Message::ReturnToken(returned) => {
                let token = returned.token;
                let generation = returned.generation;
                match self.out.remove(&token.0) {
                    true => self.answer(request, message::Returned {}),
                    false => self.refuse(request, Refusal::Token { token, generation }),
                }
            }
            Message::Pull(_) => self.pull(request),
            other => panic!("{other:?}"),
        }
    }

    fn withdraw(&mut self, request: RequestId, sequence: u64) {
        self.waits_for_push_slot.retain(|&(_, of)| of != sequence);
        let arrival = self.arrivals.remove(&sequence);
        assert!(arrival.as_ref().is_none_or(|a| a.whole.is_none()), "{sequence} was whole");
        if let Some(arrival) = arrival {
            self.push_slots.remove(&arrival.push_slot);
        }
        let outcome = *self.settled.entry(sequence).or_insert(Outcome::Withdrawn {});
        let stale = self.synchronous && matches!(outcome, Outcome::Stale { .. });
        assert!(stale || outcome == Outcome::Withdrawn {}, "{sequence} was applied");
        self.give_push_slots();
        self.answer(request, push_answer(outcome));
    }

    fn pull(&mut self, request: RequestId) {
        // Every byte of an answer is its version.
        let byte = self.version as u8;
        let step = GlobalStep(self.step);
        let half = (self.bytes / 2).next_multiple_of(8);
        for (range, last) in [(0..half, false), (half..self.bytes, true)] {
            let version = self.version;
            let offset = range.start;
            let pulled = message::Pulled { version, gradients: version, offset, last };
            let body = vec![byte; (range.end - range.start) as usize];
            self.answers.push_back((request, step, pulled.into(), body));
        }
    }

    /// Shares a push buffer with two slots.
    fn share(&mut self, request: RequestId) {
        assert!(self.shared.is_empty(), "a connection has one push buffer");
        let push_slots = vec![self.next_shared, self.next_shared + 1];
        self.next_shared += 2;
        self.shared.extend(push_slots.iter().map(|&push_slot| (push_slot, FillByte::default())));
        let push_slots = List::new(push_slots).unwrap();
        self.answer(
            request,
            message::SharedPushBuffer { bytes: 0, first: 0, stride: 0, push_slots },
        );
    }

    /// Takes a share from a slot of the push buffer. Its bytes are read later, when it is applied.
    fn shared_part(&mut self, frame: &SentFrame, shared: &PushShared) {
        let PushShared { operation, token, generation, push_slot, whole, next, read, .. } = *shared;
        let part =
            PushPart { operation, token, generation, push_slot, offset: 0, whole, next, read };
        let fill = self.shared.get(&push_slot).expect("the slot is in its push buffer").clone();
        let bytes = shared.ranges.items().iter().map(|range| range.end - range.start).sum();
        self.part(frame, &part, Some(fill), bytes);
    }

    fn part(&mut self, frame: &SentFrame, part: &PushPart, fill: Option<FillByte>, bytes: u64) {
        let request = frame.request();
        let sequence = frame.envelope.sequence.0;
        let newest = self.settled.last_key_value().map_or(0, |(newest, _)| *newest);
        assert!(sequence + WINDOW > newest, "push {sequence} is out of the window");
        if self.skipped == Some((sequence, part.push_slot)) {
            if part.whole.is_some() {
                self.skipped = None;
            }
            return;
        }
        if let Some(&outcome) = self.settled.get(&sequence) {
            if part.whole.is_some() {
                self.answer(
                    request,
                    message::PushAnswer { duplicate: true, ..push_answer(outcome) },
                );
            }
            return;
        }
        if let Some(arrival) = self.arrivals.get_mut(&sequence)
            && arrival.whole.is_some()
        {
            if part.whole.is_some() {
                arrival.whole = Some((request, part.next));
            }
            return;
        }
        let mine = self.arrivals.get(&sequence).map(|arrival| arrival.push_slot);
        let fits = match mine {
            Some(push_slot) => push_slot == part.push_slot,
            None => {
                let used =
                    self.arrivals.values().any(|arrival| arrival.push_slot == part.push_slot);
                let has = self.push_slots.contains(&part.push_slot)
                    || self.shared.contains_key(&part.push_slot);
                has && !used
            }
        };
        if !fits {
            self.skipped = part.whole.is_none().then_some((sequence, part.push_slot));
            return self.refuse(request, Refusal::PushSlotTaken { push_slot: part.push_slot });
        }
        let fresh = ModelArrival {
            push_slot: part.push_slot,
            fill: None,
            bytes: 0,
            token: part.token,
            whole: None,
        };
        let arrival = self.arrivals.entry(sequence).or_insert(fresh);
        if let Some(fill) = fill {
            let first = arrival.fill.get_or_insert_with(|| fill.clone());
            assert_eq!(now(first), now(&fill), "two pushes are mixed");
        }
        arrival.bytes += bytes;
        if let Some(named) = part.whole {
            assert_eq!(named, arrival.bytes, "parts of push {sequence} are missing");
            arrival.whole = Some((request, part.next));
            assert!(!(self.synchronous && part.next), "a synchronous push requests no token");
            if self.synchronous && !self.owner {
                self.hold(request, sequence);
            }
        }
    }
}
