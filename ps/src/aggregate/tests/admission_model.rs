//! A model of admission in asynchronous mode, by exhaustive search: two shards, two clients, kills of
//! clients, of the shard and of the step owner, cuts, lost connections and a restore at any point.
//!
//! The servers do not work like this yet: `docs/asynchronous.md`, "Gradients on some shards only", says
//! what is decided and what it costs. The rules of the model:
//!
//! 1. A shard *holds* a gradient that is whole there, durably, and reports it to the step owner.
//! 2. The step owner *admits* a gradient that every shard holds. In one commit it applies its own
//!    part, spends the token and records the admission. It repeats the announcement until the other
//!    shard has confirmed, and forgets the admission only then.
//! 3. The other shard applies a gradient when it hears of its admission, and never before.
//! 4. A token that is neither outstanding nor admitted is over: the owner answers so to a report, and
//!    the shard drops the gradient. The owner takes tokens back without asking anybody.
//! 5. A held gradient that is not admitted *yields* its push slot to one with a lower token. Another
//!    shard asks the owner first, and does not report the gradient until it is answered.
//! 6. A checkpoint is cut while no admission is unconfirmed.

use std::collections::{HashMap, VecDeque};

/// A set of tokens; one bit each.
type Tokens = u8;

/// The most tokens.
const TOKENS: u8 = 3;
const OWNER: usize = 0;
const SHARD: usize = 1;
const CLIENTS: usize = 2;
/// The push slots of each shard. With one, any two gradients compete.
const PUSH_SLOTS: u32 = 1;

/// A rule that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// Rule 2: the owner admits what it holds itself.
    AdmitAlone,
    /// Rule 2: the admission is not durable.
    ForgetAdmissions,
    /// Rule 2: the owner forgets an admission once it has announced it.
    AnnounceOnce,
    /// Rule 3: a shard applies what is whole there, as the servers do now.
    ApplyWhole,
    /// Rule 5: no gradient yields.
    NeverYield,
    /// Rule 5: a shard drops a gradient without asking.
    YieldUnasked,
    /// Rule 6: each shard cuts its part of a checkpoint when it likes.
    CutAnytime,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    /// Tokens granted so far.
    granted: u8,
    /// The tokens that the clients hold, as they know.
    clients: [Tokens; CLIENTS],
    /// Parts on their way to a shard.
    flight: [Tokens; 2],
    /// Durable: gradients held and applied, by shard.
    held: [Tokens; 2],
    applied: [Tokens; 2],
    /// Durable: tokens that are out, and admissions that are not confirmed.
    outstanding: Tokens,
    admitted: Tokens,
    /// The owner's memory: what the other shard has reported as held.
    reported: Tokens,
    /// The other shard's memory: gradients for which it has asked to yield.
    yielding: Tokens,
    /// Messages to the owner: reports, questions to yield, confirmations.
    reports: Tokens,
    questions: Tokens,
    confirmations: Tokens,
    /// Messages to the shard: admissions, tokens that are over, and permissions to yield.
    admissions: Tokens,
    overs: Tokens,
    permissions: Tokens,
    /// The gradients in the checkpoint, by shard.
    cut: [Option<Tokens>; 2],
    faults: u8,
}

fn bits(tokens: Tokens) -> impl Iterator<Item = Tokens> {
    (0..TOKENS).map(|token| 1 << token).filter(move |bit| tokens & bit != 0)
}

impl State {
    /// The connection between the shards is lost, with all that is under way.
    fn lose_link(&mut self) {
        self.reports = 0;
        self.questions = 0;
        self.confirmations = 0;
        self.admissions = 0;
        self.overs = 0;
        self.permissions = 0;
        self.yielding = 0;
    }

    /// Removes a part that has been answered, or is sent no more.
    fn drop_part(&mut self, shard: usize, token: Tokens) {
        self.flight[shard] &= !token;
    }

    fn is_full(&self, shard: usize) -> bool {
        self.held[shard].count_ones() >= PUSH_SLOTS
    }

    /// Whether nothing is under way.
    fn is_quiet(&self) -> bool {
        self.clients == [0, 0]
            && self.flight == [0, 0]
            && self.held == [0, 0]
            && self.outstanding | self.admitted == 0
    }

    /// A gradient that one shard has applied can still be applied by the other.
    fn check(&self) -> Result<(), String> {
        let differ = self.applied[OWNER] ^ self.applied[SHARD];
        let can_follow = self.applied[OWNER] & self.admitted & self.held[SHARD];
        match differ & !can_follow {
            0 if self.outstanding & self.applied[OWNER] == 0 => Ok(()),
            0 => Err("an applied gradient is still out".to_owned()),
            partly => Err(format!("tokens {partly:b} stay on some shards only")),
        }
    }

    fn with(self, change: impl FnOnce(&mut State)) -> State {
        let mut next = self;
        change(&mut next);
        next
    }

    /// The steps of processes that work.
    fn steps(self, broken: Broken, next: &mut Vec<State>) {
        self.clients_step(next);
        self.deliveries(broken, next);
        self.owner_steps(broken, next);
        self.shard_steps(next);
        let cuts = [OWNER, SHARD].into_iter().filter(|&shard| self.cut[shard].is_none());
        if broken == Broken::CutAnytime {
            next.extend(cuts.map(|shard| self.with(|s| s.cut[shard] = Some(s.applied[shard]))));
        } else if self.admitted == 0 && self.cut == [None, None] {
            next.push(self.with(|s| s.cut = [Some(s.applied[OWNER]), Some(s.applied[SHARD])]));
        }
    }

    fn clients_step(self, next: &mut Vec<State>) {
        for client in 0..CLIENTS {
            match self.clients[client] {
                0 if self.granted < TOKENS => next.push(self.with(|s| {
                    let token = 1 << s.granted;
                    s.granted += 1;
                    s.clients[client] = token;
                    s.outstanding |= token;
                    s.flight = s.flight.map(|flight| flight | token);
                })),
                0 => {}
                token => {
                    let is_applied = self.applied[OWNER] & self.applied[SHARD] & token != 0;
                    let is_live = (self.outstanding | self.admitted) & token != 0;
                    if is_applied || !is_live {
                        next.push(self.with(|s| s.clients[client] = 0));
                    }
                }
            }
        }
        // Nobody sends these parts again.
        let sent = self.clients[0] | self.clients[1];
        for shard in [OWNER, SHARD] {
            let ghosts = self.flight[shard] & !sent;
            next.extend(bits(ghosts).map(|token| self.with(|s| s.drop_part(shard, token))));
        }
    }

    /// Parts arrive, and find a push slot or wait for one.
    fn deliveries(self, broken: Broken, next: &mut Vec<State>) {
        for token in bits(self.flight[OWNER]) {
            match self.outstanding & token != 0 {
                false => next.push(self.with(|s| s.drop_part(OWNER, token))),
                true if !self.is_full(OWNER) => next.push(self.with(|s| {
                    s.drop_part(OWNER, token);
                    s.held[OWNER] |= token;
                })),
                // The owner knows what is admitted.
                true if broken != Broken::NeverYield => {
                    let younger = bits(self.held[OWNER]).filter(|&held| held > token);
                    next.extend(younger.map(|held| {
                        self.with(|s| {
                            s.held[OWNER] &= !held;
                            s.flight[OWNER] |= held;
                        })
                    }));
                }
                true => {}
            }
        }
        for token in bits(self.flight[SHARD]) {
            if (self.applied[SHARD] | self.held[SHARD]) & token != 0 {
                next.push(self.with(|s| s.drop_part(SHARD, token)));
            } else if !self.is_full(SHARD) {
                next.push(self.with(|s| {
                    s.drop_part(SHARD, token);
                    match broken {
                        Broken::ApplyWhole => s.applied[SHARD] |= token,
                        _ => s.held[SHARD] |= token,
                    }
                }));
            } else {
                let younger = bits(self.held[SHARD] & !self.yielding).filter(|&held| held > token);
                match broken {
                    Broken::NeverYield => {}
                    Broken::YieldUnasked => next.extend(younger.map(|held| {
                        self.with(|s| {
                            s.held[SHARD] &= !held;
                            s.flight[SHARD] |= held;
                        })
                    })),
                    _ => next.extend(younger.map(|held| {
                        self.with(|s| {
                            s.yielding |= held;
                            s.questions |= held;
                        })
                    })),
                }
            }
        }
    }

    fn owner_steps(self, broken: Broken, next: &mut Vec<State>) {
        for token in bits(self.reports) {
            next.push(self.with(|s| {
                s.reports &= !token;
                match () {
                    () if s.outstanding & token != 0 => s.reported |= token,
                    () if s.admitted & token != 0 => s.admissions |= token,
                    () => s.overs |= token,
                }
            }));
        }
        // A report of the same gradient arrives before the question: one connection, in order.
        for token in bits(self.questions & !self.reports) {
            next.push(self.with(|s| {
                s.questions &= !token;
                match () {
                    () if s.admitted & token != 0 => s.admissions |= token,
                    () => {
                        s.reported &= !token;
                        s.permissions |= token;
                    }
                }
            }));
        }
        let everywhere = match broken {
            Broken::AdmitAlone | Broken::ApplyWhole => Tokens::MAX,
            _ => self.reported,
        };
        for token in bits(self.outstanding & self.held[OWNER] & everywhere) {
            next.push(self.with(|s| {
                s.held[OWNER] &= !token;
                s.outstanding &= !token;
                s.reported &= !token;
                s.applied[OWNER] |= token;
                s.admissions |= token;
                if broken != Broken::AnnounceOnce {
                    s.admitted |= token;
                }
            }));
        }
        for token in bits(self.admitted & !self.admissions) {
            next.push(self.with(|s| s.admissions |= token));
        }
        for token in bits(self.confirmations) {
            next.push(self.with(|s| {
                s.confirmations &= !token;
                s.admitted &= !token;
            }));
        }
        // A client that is gone: its lease expires. Parts that it sent may still arrive.
        let gone = self.outstanding & !(self.clients[0] | self.clients[1]);
        next.extend(bits(gone).map(|token| self.take_back(token)));
    }

    fn take_back(self, token: Tokens) -> State {
        self.with(|s| {
            s.outstanding &= !token;
            s.reported &= !token;
            s.held[OWNER] &= !token;
            s.overs |= token;
        })
    }

    fn shard_steps(self, next: &mut Vec<State>) {
        for token in bits(self.held[SHARD] & !self.yielding & !self.reports) {
            next.push(self.with(|s| s.reports |= token));
        }
        for token in bits(self.admissions) {
            next.push(self.with(|s| {
                s.admissions &= !token;
                // What it does not hold, it has applied before.
                if s.held[SHARD] & token != 0 {
                    s.held[SHARD] &= !token;
                    s.applied[SHARD] |= token;
                }
                s.yielding &= !token;
                s.confirmations |= token;
            }));
        }
        for token in bits(self.overs) {
            next.push(self.with(|s| {
                s.overs &= !token;
                s.held[SHARD] &= !token;
                s.yielding &= !token;
            }));
        }
        for token in bits(self.permissions) {
            next.push(self.with(|s| {
                s.permissions &= !token;
                if s.yielding & s.held[SHARD] & token != 0 {
                    s.held[SHARD] &= !token;
                    s.flight[SHARD] |= token;
                }
                s.yielding &= !token;
            }));
        }
    }

    fn faults(self, broken: Broken, next: &mut Vec<State>) {
        let fault = self.with(|s| s.faults += 1);
        for client in 0..CLIENTS {
            // It dies, or it is cut off: its parts may arrive, and the owner takes its token back.
            let token = self.clients[client];
            next.push(fault.with(|s| s.clients[client] = 0));
            if token & self.outstanding != 0 {
                next.push(fault.take_back(token));
            }
        }
        next.push(fault.with(State::lose_link));
        next.push(fault.with(|s| {
            // The step owner is killed.
            s.lose_link();
            s.reported = 0;
            if broken == Broken::ForgetAdmissions {
                s.admitted = 0;
            }
        }));
        if let [Some(own), Some(other)] = self.cut {
            next.push(fault.with(|s| {
                s.lose_link();
                s.reported = 0;
                s.outstanding = 0;
                s.admitted = 0;
                s.held = [0, 0];
                s.flight = [0, 0];
                s.clients = [0, 0];
                s.applied = [own, other];
            }));
        }
    }
}

/// The result of a search.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// Nothing, in this many states.
    Nothing(usize),
    Violation(String),
    /// A state from which the processes never become quiet, even without another fault.
    Stuck,
}

/// Explores every state with this many tokens and at most this many faults.
fn explore(broken: Broken, tokens: u8, faults: u8) -> Found {
    let first = State { granted: TOKENS - tokens, ..State::default() };
    let mut numbers: HashMap<State, u32> = HashMap::from([(first, 0)]);
    let mut states = vec![first];
    // The steps backwards, without faults.
    let mut before: Vec<Vec<u32>> = vec![Vec::new()];
    let mut at = 0;
    let mut next = Vec::new();
    while let Some(&state) = states.get(at) {
        if let Err(violation) = state.check() {
            return Found::Violation(violation);
        }
        state.steps(broken, &mut next);
        let steps = next.len();
        if state.faults < faults {
            state.faults(broken, &mut next);
        }
        for (index, found) in next.drain(..).enumerate() {
            let number = *numbers.entry(found).or_insert_with(|| {
                states.push(found);
                before.push(Vec::new());
                states.len() as u32 - 1
            });
            if index < steps {
                before[number as usize].push(at as u32);
            }
        }
        at += 1;
    }
    let quiet = states.iter().enumerate().filter(|(_, state)| state.is_quiet());
    let mut queue: VecDeque<u32> = quiet.map(|(number, _)| number as u32).collect();
    let mut becomes_quiet = vec![false; states.len()];
    queue.iter().for_each(|&number| becomes_quiet[number as usize] = true);
    while let Some(number) = queue.pop_front() {
        for &earlier in &before[number as usize] {
            if !std::mem::replace(&mut becomes_quiet[earlier as usize], true) {
                queue.push_back(earlier);
            }
        }
    }
    match becomes_quiet.iter().all(|&becomes_quiet| becomes_quiet) {
        true => Found::Nothing(states.len()),
        false => Found::Stuck,
    }
}

#[test]
fn admitted_gradients_are_applied_on_every_shard_or_on_none() {
    let is_thorough = std::env::var_os("PUSHPULL_THOROUGH").is_some();
    let tokens = if is_thorough { 3 } else { 2 };
    let found = explore(Broken::Nothing, tokens, 1);
    println!("{tokens} tokens: {found:?}");
    assert!(matches!(found, Found::Nothing(10_000..)), "{found:?}");
}

#[test]
fn each_rule_is_needed() {
    for (broken, is_stuck) in [
        (Broken::AdmitAlone, false),
        (Broken::ForgetAdmissions, false),
        (Broken::AnnounceOnce, false),
        (Broken::ApplyWhole, false),
        (Broken::NeverYield, true),
        (Broken::YieldUnasked, false),
        (Broken::CutAnytime, false),
    ] {
        match explore(broken, 2, 1) {
            Found::Violation(_) if !is_stuck => {}
            Found::Stuck if is_stuck => {}
            found => panic!("{broken:?}: {found:?}"),
        }
    }
}
