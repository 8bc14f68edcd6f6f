//! Exhaustive exploration of the memory of push slots: every state that a few clients and slots can
//! reach, with a budget for some of the slots that another shard takes from as well.
//!
//! The inbox is the real code. The requests that wait are served as the shard does: in their order,
//! whenever something has changed.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use pushpull_store::arena::{Budget, Memory, Reservation};
use pushpull_store::layout::PAGE_BYTES;
use pushpull_store::planted::PlantedBugs;

use super::{WHOLE, arrival, layout};
use crate::client_key::ClientKey;
use crate::inbox::slot_memory::UNUSED_MAX;
use crate::inbox::{Inbox, PushSlot, SlotMemory, SlotSizes};

/// A configuration to explore.
#[derive(Clone, Copy, Debug)]
struct ModelSetting {
    clients: u32,
    slots: usize,
    kept: usize,
    /// The number of slots, beyond those that keep their memory, that the budget has memory for.
    affordable: u64,
    planted: PlantedBugs,
}

/// An event of an inbox, of its clients or of another shard.
#[derive(Clone, Copy, Debug)]
enum ModelEvent {
    /// A client requests a slot.
    Request(u32),
    /// The first byte of a client's push arrives.
    Begin(u32),
    /// The last byte of a client's push arrives.
    Complete(u32),
    /// The oldest whole push of a client is applied, and the client is offered a slot.
    Apply(u32),
    /// The connection of a client ends, in the middle of a push or not.
    Disconnect(u32),
    /// The lease of a client ends.
    Lose(u32),
    /// Nothing happens for longer than a slot keeps its memory unused.
    Idle,
    /// Another shard takes memory for one slot off the budget.
    OtherTakes,
    /// The other shard returns it.
    OtherReturns,
}

/// The abstract state of an inbox, without slot numbers and times.
type Key = (Vec<(bool, u8, Option<u32>, usize)>, Vec<u32>, usize);

struct InboxModel {
    setting: ModelSetting,
    inbox: Inbox,
    budget: Budget,
    of_other: Vec<Reservation>,
    waiting: VecDeque<u32>,
    pushes: u64,
    now: Instant,
}

const STRIDE: u64 = 4096;

impl InboxModel {
    fn new(setting: ModelSetting, begin: Instant) -> InboxModel {
        let ModelSetting { slots, kept, affordable, planted, .. } = setting;
        let layout = layout(&[16]);
        let budget = Budget::new(affordable * STRIDE);
        let bytes = PAGE_BYTES + Inbox::file_bytes(&layout, slots) as usize;
        let memory = Memory::anonymous(bytes).expect("memory for a test");
        let sizes = SlotSizes { stride: STRIDE as usize, slots, kept };
        let memory = SlotMemory::new(memory, sizes, &budget, planted);
        let inbox = Inbox::new(memory, &layout, slots, 1);
        let (of_other, waiting) = Default::default();
        InboxModel { setting, inbox, budget, of_other, waiting, pushes: 0, now: begin }
    }

    /// Returns the slot of a client for which `is_it` holds.
    fn find(&self, client: u32, is_it: impl Fn(&PushSlot) -> bool) -> Option<u32> {
        let mut slots = self.inbox.push_slots.iter().flatten();
        let found = slots.find(|slot| slot.holder == Some(ClientKey(client)) && is_it(slot));
        found.map(|slot| slot.number)
    }

    fn unused(&self, client: u32) -> Option<u32> {
        self.find(client, |slot| slot.arrival.is_none())
    }

    fn unfinished(&self, client: u32) -> Option<u32> {
        self.find(client, |slot| slot.arrival.is_some() && !slot.is_whole())
    }

    fn whole(&self, client: u32) -> Option<u32> {
        self.find(client, PushSlot::is_whole)
    }

    fn events(&self) -> Vec<ModelEvent> {
        let mut events = vec![ModelEvent::Idle, ModelEvent::OtherTakes, ModelEvent::OtherReturns];
        for client in 0..self.setting.clients {
            let unused = self.unused(client);
            let unfinished = self.unfinished(client);
            if !self.waiting.contains(&client) {
                events.push(ModelEvent::Request(client));
            }
            if unused.is_some() && unfinished.is_none() {
                events.push(ModelEvent::Begin(client));
            }
            if unfinished.is_some() {
                events.push(ModelEvent::Complete(client));
            }
            if self.whole(client).is_some() {
                events.push(ModelEvent::Apply(client));
            }
            if unused.or(unfinished).is_some() || self.waiting.contains(&client) {
                events.push(ModelEvent::Disconnect(client));
                events.push(ModelEvent::Lose(client));
            }
        }
        events
    }

    fn handle(&mut self, event: ModelEvent) {
        // Every event has a time of its own, so that the order of offers is known.
        self.now += Duration::from_nanos(1);
        let now = self.now;
        match event {
            ModelEvent::Request(client) => {
                let key = ClientKey(client);
                let free = self.inbox.reserve(key, now);
                let reserve =
                    |inbox: &mut Inbox| inbox.free_up(now).then(|| inbox.reserve(key, now));
                if free.or_else(|| reserve(&mut self.inbox).flatten()).is_none() {
                    self.waiting.push_back(client);
                }
            }
            ModelEvent::Begin(client) => {
                let number = self.unused(client).expect("the event is possible");
                // Without memory for an offered slot the push is refused.
                if self.inbox.ensure_memory(number, now) {
                    self.pushes += 1;
                    self.inbox.begin(number, arrival(self.pushes), now);
                }
            }
            ModelEvent::Complete(client) => {
                let number = self.unfinished(client).expect("the event is possible");
                self.inbox.set_whole(number, WHOLE);
            }
            ModelEvent::Apply(client) => {
                let number = self.whole(client).expect("the event is possible");
                assert!(self.inbox.take(number).is_some(), "a whole push is there");
                self.serve();
                if self.waiting.is_empty() {
                    self.inbox.offer(ClientKey(client), now);
                }
            }
            ModelEvent::Disconnect(client) => {
                self.waiting.retain(|&waiting| waiting != client);
                self.inbox.discard_incomplete(ClientKey(client));
            }
            ModelEvent::Lose(client) => {
                self.waiting.retain(|&waiting| waiting != client);
                self.inbox.drop_client(ClientKey(client));
            }
            ModelEvent::Idle => {
                self.inbox.take_back_memory(now);
                self.now += UNUSED_MAX;
                self.inbox.take_back_memory(self.now);
            }
            ModelEvent::OtherTakes => self.of_other.extend(self.budget.reserve(STRIDE).ok()),
            ModelEvent::OtherReturns => drop(self.of_other.pop()),
        }
        self.serve();
    }

    /// Gives free slots to the requests that wait.
    fn serve(&mut self) {
        while !self.waiting.is_empty()
            && self.inbox.free_up(self.now)
            && let Some(client) = self.waiting.pop_front()
        {
            let reserved = self.inbox.reserve(ClientKey(client), self.now);
            assert!(reserved.is_some(), "the request of client {client} is lost");
        }
    }

    fn check(&self) {
        self.inbox.check_invariants();
        for (slot, push_slot) in self.inbox.push_slots.iter().enumerate() {
            let is_used = |it: &PushSlot| it.requested || it.arrival.is_some();
            let is_used = push_slot.as_ref().is_some_and(is_used);
            let is_to_be_had = self.inbox.memory.has(slot) || self.budget.left() >= STRIDE;
            assert!(
                self.waiting.is_empty() || is_used || !is_to_be_had,
                "a request waits although push slot {slot} can be had"
            );
        }
        let of_other: u64 = self.of_other.iter().map(Reservation::bytes).sum();
        let used = self.budget.left() + self.inbox.on_demand_bytes() + of_other;
        assert_eq!(used, self.setting.affordable * STRIDE, "the budget is used by slots only");
    }

    /// Lets every client finish what it has begun, without new requests. Every request must be
    /// served meanwhile, even if the other shard has taken all memory.
    fn check_progress(mut self) {
        while self.budget.left() >= STRIDE {
            self.handle(ModelEvent::OtherTakes);
        }
        for _ in 0..4 * (self.setting.slots + self.setting.clients as usize) {
            for client in 0..self.setting.clients {
                if self.unfinished(client).is_some() {
                    self.handle(ModelEvent::Complete(client));
                } else if self.whole(client).is_some() {
                    self.handle(ModelEvent::Apply(client));
                } else if self
                    .find(client, |slot| slot.arrival.is_none() && slot.requested)
                    .is_some()
                {
                    self.handle(ModelEvent::Begin(client));
                }
            }
        }
        assert!(self.waiting.is_empty(), "requests of {:?} are never served", self.waiting);
    }

    fn key(&self) -> Key {
        let slots =
            self.inbox.push_slots.iter().enumerate().map(|(slot, push_slot)| {
                let has_memory = self.inbox.memory.has(slot);
                let Some(push_slot) = push_slot else { return (has_memory, 0, None, 0) };
                let state = match &push_slot.arrival {
                    None if push_slot.requested => 1,
                    None => 2,
                    Some(push) if push.whole.is_none() => 3,
                    Some(_) => 4,
                };
                // The slot that was offered first is reclaimed first.
                let earlier =
                    self.inbox.push_slots.iter().flatten().filter(|other| {
                        state == 2 && other.last_progress < push_slot.last_progress
                    });
                (has_memory, state, push_slot.holder.map(|client| client.0), earlier.count())
            });
        (slots.collect(), self.waiting.iter().copied().collect(), self.of_other.len())
    }
}

/// Explores a setting. Returns the number of states.
fn explore(setting: ModelSetting) -> usize {
    let begin = Instant::now();
    let reach = |path: &[ModelEvent]| {
        let mut model = InboxModel::new(setting, begin);
        path.iter().for_each(|&event| model.handle(event));
        model
    };
    let mut seen = HashSet::from([reach(&[]).key()]);
    let mut reached: VecDeque<Vec<ModelEvent>> = VecDeque::from([Vec::new()]);
    while let Some(path) = reached.pop_front() {
        for event in reach(&path).events() {
            let next = [&path[..], &[event]].concat();
            let model = reach(&next);
            if seen.insert(model.key()) {
                model.check();
                model.check_progress();
                reached.push_back(next);
            } else {
                model.check();
            }
        }
    }
    seen.len()
}

/// Explores all settings. Returns the number of states.
pub(crate) fn suite(planted: PlantedBugs) -> usize {
    let settings =
        [(2, 2, 1, 0), (2, 2, 1, 1), (2, 3, 1, 1), (2, 3, 2, 1), (3, 2, 1, 1), (3, 3, 1, 1)];
    let explored = settings.map(|(clients, slots, kept, affordable)| {
        explore(ModelSetting { clients, slots, kept, affordable, planted })
    });
    explored.iter().sum()
}

#[test]
fn every_request_for_a_push_slot_is_served_and_the_budget_is_exact() {
    let states = suite(PlantedBugs::default());
    println!("{states} states");
    assert!(states > 1000, "only {states} states");
}
