//! A walk over everything that must hold in a pool, for tests and simulations.

use std::sync::atomic::Ordering::Relaxed;

use super::{Handle, PageSource, Pool, ZspageId, slots_batch};

/// Goal: the invariants hold of a pool in which so many handles have no object. Method: walk everything; nobody else
/// may use the pool meanwhile.
pub(crate) fn check_rows<S: PageSource>(pool: &Pool<S>, without_object: usize) {
    let (mut objects, mut pages, mut slots) = (0, 0, pool.slots.vacant_len());
    let zspages = pool.zspages.all();
    let mut of_class = vec![Vec::new(); pool.classes.len()];
    zspages.iter().for_each(|id| of_class[pool.zspages.get(*id).class.get()].push(*id));
    for (class, of_class) in pool.classes.iter().zip(&of_class) {
        let inner = class.lock();
        let (class_objects, class_pages) = inner.check(&pool.zspages, of_class, class.shape());
        assert!(inner.slots.len() <= 3 * slots_batch(class.shape()));
        slots += inner.slots.len();
        objects += class_objects;
        pages += class_pages;
    }
    let owner_is_right = |id: &ZspageId| {
        let owners = pool.zspages.owners(*id).iter().enumerate();
        owners.map(|(index, owner)| (index, owner.load(Relaxed))).all(|(index, owner)| {
            Handle::from_raw(owner).is_none_or(|handle| {
                let object = pool.object(handle);
                object.zspage == *id && object.index == index
            })
        })
    };
    assert!(zspages.iter().all(owner_is_right), "ZS-3");
    let stats = pool.stats();
    let slots_live = pool.slots.len() as usize - slots as usize - without_object;
    assert_eq!((stats.objects, slots_live), (objects as u64, objects), "objects and live slots");
    assert_eq!(stats.pages_used, pages as u64, "ZS-6");
    assert!(stats.pages_used <= stats.pages_taken && stats.pages_used <= stats.pages_used_max);
    let rows = pool.classes();
    assert_eq!(rows.iter().map(|row| row.obj_used).sum::<usize>(), objects);
    assert_eq!(rows.iter().map(|row| row.pages_used).sum::<usize>(), pages);
}
