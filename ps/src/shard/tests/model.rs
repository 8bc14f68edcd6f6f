//! Random runs of several clients, checked against a ledger of their pushes.
//!
//! Every gradient adds 1 to all elements of `dense` and to its own element of `ledger`. The ledger
//! therefore shows pushes that were lost, applied twice, or applied in part.
//!
//! In every other run the gradients are of effects, which are pushed again if their outcome is
//! not known, and at times if it is. Each push of an effect adds to the same element.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::limits::EFFECT_WINDOW;
use pushpull_common::protocol::message::{self, CoordinatorIs};
use pushpull_common::protocol::{Envelope, Grant, Message, Outcome, Refusal};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;
use pushpull_store::planted::PlantedBugs;

use super::actors::{Actor, DENSE, LEDGER, Pending, actor, check_whole, random_parts};
use super::effects::{coordinator_is, effect, open};
use super::peers::{Peer, Push, unpack};
use super::random::Random;
use super::world::{ConnectionId, World};
use crate::config::{PsConfig, Storage};

const SEEDS: u64 = 300;
const STEPS: usize = 600;
const LEASE: Duration = Duration::from_millis(400);

pub(super) struct Model {
    pub(super) world: World,
    pub(super) random: Random,
    pub(super) actors: Vec<Actor>,
    pub(super) last_step: u64,
    pub(super) next_entry: usize,
    pub(super) acknowledged: BTreeSet<usize>,
    /// Pushes whose outcome nobody learns, because their client restarted.
    pub(super) unknown: BTreeSet<usize>,
    pub(super) refused: BTreeSet<usize>,
    pub(super) reader: ConnectionId,
    pub(super) read: (u64, f32),
    /// The coordinator of the gradients, if they have effects. Entry *n* of the ledger is effect
    /// *n + 1*.
    coordinator: Option<CoordinatorIs>,
    /// The entries of effects that are to be pushed again.
    again: Vec<usize>,
    chief: Peer,
    kills: usize,
}

impl Model {
    fn new(seed: u64, planted: PlantedBugs) -> Model {
        let mut random = Random::new(seed);
        let variables = vec![
            VariableSpec::f32("dense", [DENSE as u64]).unwrap(),
            VariableSpec::f32("ledger", [LEDGER as u64]).unwrap(),
        ];
        let push_slots = 1 + random.below(3) as usize;
        let last_step = 3 + random.below(30);
        let (mut world, lines) = World::ready(variables, Sgd::new(1.0), |config| {
            let timeout = Some(Duration::from_secs(3));
            let config = config.last_step(last_step).lease(LEASE).inbox_pushes(push_slots);
            // Small blocks, so that a push spans several of them and a block holds few rows.
            let config =
                config.token_timeout(timeout).storage(Storage::memory().integrity_full(true));
            PsConfig { block_bytes: 256, planted, ..config }
        });
        let reader = lines[0];
        let chief = super::peers::chief();
        world.chop = 16 + random.below(800) as usize;
        let coordinator =
            random.one_in(2).then(|| coordinator_is(world.ask(lines[0], open("trainer"))));
        let actors = (1..=2 + random.below(3) as u32).map(actor).collect();
        Model {
            world,
            random,
            actors,
            last_step,
            next_entry: 0,
            acknowledged: BTreeSet::new(),
            unknown: BTreeSet::new(),
            refused: BTreeSet::new(),
            reader,
            read: (0, 0.0),
            coordinator,
            again: Vec::new(),
            chief,
            kills: 0,
        }
    }

    /// Performs one random action.
    fn step(&mut self) {
        let index = self.random.below(self.actors.len() as u64) as usize;
        match self.random.below(400) {
            0..=299 => self.act(index),
            300..=307 => self.disconnect(index),
            308 => self.restart(index),
            392..=395 => self.kill_server(),
            309 => self.leave(index),
            310..=311 => self.withdraw(index),
            312 => self.resume_coordinator(),
            313..=319 => self.resend_settled(index),
            320..=321 => self.return_token(index),
            322..=335 => self.read(),
            336..=379 => {
                self.world.slice(0);
            }
            _ => {
                let alive: Vec<ConnectionId> =
                    self.actors.iter().filter_map(|actor| actor.line).collect();
                // Sometimes longer than a lease, so that silent clients are lost.
                let long = self.random.one_in(8);
                let millis = if long { 500 } else { self.random.below(60) };
                let silent = if long { self.random.below(alive.len() as u64 + 1) } else { 0 };
                let lines = alive.into_iter().skip(silent as usize).chain([self.reader]);
                let lines: Vec<ConnectionId> =
                    lines.filter(|line| !self.world.closed.contains(line)).collect();
                self.world.pass(Duration::from_millis(millis), &lines);
            }
        }
        for index in 0..self.actors.len() {
            self.listen(index);
        }
    }

    /// Performs the client's next action.
    pub(super) fn act(&mut self, index: usize) {
        let actor = &mut self.actors[index];
        let Some(line) = actor.line else {
            return self.connect(index);
        };
        if let Some(pending) = &mut actor.pending {
            if pending.push.push_slot == 0 {
                match actor.push_slot {
                    0 if actor.reserving.is_none() => {
                        actor.reserving = Some(self.world.say(line, message::Reserve {}.into()));
                    }
                    0 => {}
                    push_slot => (pending.push.push_slot, actor.push_slot) = (push_slot, 0),
                }
                return;
            }
            if pending.sent < pending.parts.len() {
                let total: usize = pending.parts.iter().map(|(_, body)| body.len()).sum();
                let last = pending.sent + 1 == pending.parts.len();
                let (offset, body) = &pending.parts[pending.sent];
                let part = pending.push.part(*offset, last.then_some(total as u64));
                let envelope = pending.push.envelope();
                pending.sent += 1;
                let request = self.world.announce(line, envelope, part, body.len());
                pending.request = Some(request);
                if self.random.one_in(12) {
                    let end = self.random.below(body.len() as u64) as usize;
                    self.world.body_until(line, body, end);
                    return self.cut(index);
                }
                if self.random.one_in(12) {
                    self.world.slice(0);
                }
                self.world.body(line, body);
            }
        } else if let Some(grant) = actor.token.take() {
            let entry = self.choose_entry();
            let actor = &mut self.actors[index];
            actor.sequence += 1;
            let mut push = Push::gradient(actor.sequence, grant, 0);
            push.effect =
                self.coordinator.as_ref().map(|coordinator| effect(coordinator, entry as u64 + 1));
            push.next = self.random.one_in(2);
            // An arbitrary read version, which the shard must clamp.
            push.read = push.next.then_some(actor.sequence);
            let parts = random_parts(entry, &mut self.random);
            actor.pending = Some(Pending { push, entry, parts, sent: 0, request: None });
        } else if actor.asked.is_none() {
            let ask = message::TokenRequest { newest: actor.newest };
            actor.asked = Some(self.world.say(line, ask.into()));
        }
    }

    /// Returns the entry of the next gradient: a new one, or that of an effect that is pushed
    /// again.
    fn choose_entry(&mut self) -> usize {
        if self.coordinator.is_some() {
            let fits = self.next_entry < EFFECT_WINDOW as usize;
            if let Some(entry) = self.again.pop() {
                return entry;
            }
            if self.next_entry > 0 && (!fits || self.random.one_in(4)) {
                return self.random.below(self.next_entry as u64) as usize;
            }
        }
        let entry = self.next_entry;
        self.next_entry += 1;
        assert!(entry < LEDGER, "the ledger is large enough");
        entry
    }

    /// Opens the coordinator again, as one that resumes.
    fn resume_coordinator(&mut self) {
        if let Some(coordinator) = &mut self.coordinator {
            *coordinator = coordinator_is(self.world.ask(self.reader, open("trainer")));
        }
    }

    /// Records a push that does not count. Another push of its effect may, and another follows.
    fn does_not_count(&mut self, entry: usize) {
        match self.coordinator {
            None => _ = self.refused.insert(entry),
            Some(_) => {
                self.unknown.insert(entry);
                self.again.push(entry);
            }
        }
    }

    fn connect(&mut self, index: usize) {
        let actor = &mut self.actors[index];
        let Ok(line) = self.world.try_join(0, &mut actor.peer) else {
            panic!("the client is not welcome")
        };
        actor.line = Some(line);
    }

    /// Breaks the connection. Half of the time another connection has taken over before.
    fn cut(&mut self, index: usize) {
        let Some(line) = self.actors[index].line else {
            return;
        };
        self.forget_line(index);
        if self.random.one_in(2) {
            self.connect(index);
        }
        self.world.disconnect(line);
    }

    fn disconnect(&mut self, index: usize) {
        if self.actors[index].line.is_some() {
            self.cut(index);
        }
    }

    fn forget_line(&mut self, index: usize) {
        let keeps_push_slot = self.random.one_in(2);
        let actor = &mut self.actors[index];
        actor.line = None;
        actor.asked = None;
        actor.reserving = None;
        if let Some(pending) = &mut actor.pending {
            pending.sent = 0;
            pending.request = None;
            if !keeps_push_slot {
                pending.push.push_slot = 0;
                actor.push_slot = 0;
            }
        }
    }

    fn restart(&mut self, index: usize) {
        self.disconnect(index);
        let actor = &mut self.actors[index];
        if let Some(line) = actor.line {
            // `disconnect` has connected again; that connection ends as well.
            self.world.disconnect(line);
        }
        let entry = actor.pending.take().map(|pending| pending.entry);
        self.unknown.extend(entry);
        self.again.extend(entry);
        let peer = actor.peer.restarted();
        *actor = Actor { peer, ..self::actor(0) };
    }

    fn leave(&mut self, index: usize) {
        let actor = &mut self.actors[index];
        let Some(line) = actor.line.filter(|_| actor.pending.is_none()) else {
            return;
        };
        let left = self.world.say(line, message::Leave {}.into());
        // The client may have been lost before.
        self.world.answer(line, left).expect("`Leave` is answered");
        actor.token = None;
        actor.push_slot = 0;
        self.disconnect(index);
    }

    fn withdraw(&mut self, index: usize) {
        let actor = &mut self.actors[index];
        let (Some(line), Some(pending)) = (actor.line, &mut actor.pending) else {
            return;
        };
        let sequence = Sequence(pending.push.sequence);
        let envelope = Envelope { sequence, ..Envelope::default() };
        let request = self.world.send(line, envelope, message::Withdraw {}.into(), &[]);
        (pending.request, pending.sent) = (Some(request), pending.parts.len());
    }

    fn resend_settled(&mut self, index: usize) {
        let actor = &self.actors[index];
        let push = actor.settled.get(self.random.below(actor.settled.len() as u64) as usize);
        let (Some(line), Some(&push)) = (actor.line, push) else {
            return;
        };
        let request = self.world.push(line, &push, &[(0, &[0; 16])]);
        match self.world.answer(line, request) {
            Some(Message::PushAnswer(answer)) => assert!(answer.duplicate),
            Some(Message::Refused(refused)) => {
                let fenced = matches!(refused.refusal, Refusal::Fenced { .. });
                assert!(fenced, "a resend is refused: {}", refused.refusal);
            }
            other => panic!("a resend is answered {other:?}"),
        }
    }

    fn return_token(&mut self, index: usize) {
        let actor = &mut self.actors[index];
        let Some(line) = actor.line else { return };
        let Some(Grant { token, generation, .. }) = actor.token.take() else {
            return;
        };
        self.world.say(line, message::ReturnToken { token, generation }.into());
    }

    /// Kills the server and restarts it on the files that it left.
    fn kill_server(&mut self) {
        self.world.restart(0).expect("the restarted server opens its files");
        self.kills += 1;
        for index in 0..self.actors.len() {
            self.forget_line(index);
        }
        self.reader = self.world.join(0, &mut self.chief);
    }

    /// Pulls all values as a reader, and checks that they are the sum of whole pushes.
    fn read(&mut self) {
        self.world.pull(self.reader, 0);
        while let Some(parts) = self.world.streamed(self.reader) {
            let (values, version) = unpack(parts);
            let applied = check_whole(&values);
            assert_eq!(applied, version as f32, "a version is a number of pushes");
            assert!((version, applied) >= self.read, "versions and values never go back");
            self.read = (version, applied);
        }
    }

    /// Handles the answers that the client has received.
    pub(super) fn listen(&mut self, index: usize) {
        let actor = &mut self.actors[index];
        let Some(line) = actor.line else { return };
        if let Some(asked) = actor.asked
            && let Some(answer) = self.world.answer(line, asked)
        {
            actor.asked = None;
            match answer {
                Message::Granted(granted) => actor.take(granted.grant),
                Message::Ended(_) | Message::Refused(_) => {}
                other => panic!("a token request is answered {other:?}"),
            }
        }
        if let Some(reserving) = actor.reserving
            && let Some(answer) = self.world.answer(line, reserving)
        {
            actor.reserving = None;
            if let Message::Reserved(push_slot) = answer {
                actor.push_slot = push_slot.push_slot;
            }
        }
        if let Some(pending) = &actor.pending
            && let Some(request) = pending.request
            && let Some(answer) = self.world.answer(line, request)
        {
            self.settle(index, answer);
        }
        if self.world.closed.contains(&line) {
            self.cut(index);
        }
    }

    fn settle(&mut self, index: usize, answer: Message) {
        let actor = &mut self.actors[index];
        let Some(mut pending) = actor.pending.take() else {
            return;
        };
        match answer {
            Message::PushAnswer(answer) => {
                let counts =
                    matches!(answer.outcome, Outcome::Applied { .. } | Outcome::Repeated {});
                actor.settled.push(pending.push);
                actor.push_slot = answer.push_slot;
                if let Some(grant) = answer.next {
                    actor.take(grant);
                }
                match counts {
                    true => _ = self.acknowledged.insert(pending.entry),
                    false => self.does_not_count(pending.entry),
                }
            }
            Message::Refused(refused) => match refused.refusal {
                Refusal::PushSlotTaken { .. } => {
                    pending.push.push_slot = 0;
                    pending.sent = 0;
                    pending.request = None;
                    actor.pending = Some(pending);
                }
                Refusal::Token { .. } => self.does_not_count(pending.entry),
                // The coordinator has resumed meanwhile. The token is not spent.
                Refusal::CoordinatorEpoch { .. } => {
                    let grant = pending.push.grant;
                    if actor.token.is_none() {
                        actor.token = Some(grant);
                    } else if let Some(line) = actor.line {
                        let Grant { token, generation, .. } = grant;
                        self.world.say(line, message::ReturnToken { token, generation }.into());
                    }
                    self.does_not_count(pending.entry);
                }
                // The silent client lost its lease and connection. It retries over another one.
                Refusal::Fenced { .. } => actor.pending = Some(pending),
                other => panic!("a push is refused: {other}"),
            },
            other => panic!("a push is answered {other:?}"),
        }
    }
}

#[test]
fn random_runs_lose_no_push_and_apply_none_twice() {
    let seeds = std::env::var("PUSHPULL_SEED").ok().and_then(|seed| seed.parse().ok());
    suite(PlantedBugs::default(), seeds.map_or(0..SEEDS, |seed: u64| seed..seed + 1));
}

/// Runs the model once for each of these seeds.
pub(super) fn suite(planted: PlantedBugs, seeds: Range<u64>) {
    let mut pushes = 0;
    let mut unknown = 0;
    let mut refused = 0;
    let mut kills = 0;
    let mut repeated = 0;
    for seed in seeds {
        let seed_guard = super::random::PrintSeedOnPanic(seed);
        let mut model = Model::new(seed, planted);
        for _ in 0..STEPS {
            model.step();
        }
        model.settle_and_check();
        pushes += model.acknowledged.len();
        unknown += model.unknown.len();
        refused += model.refused.len();
        kills += model.kills;
        repeated += model.world.metrics().gradients_repeated;
        drop(seed_guard);
    }
    println!(
        "{pushes} pushes acknowledged, {repeated} repeated, {unknown} unknown, {refused} refused, \
         {kills} kills"
    );
}
